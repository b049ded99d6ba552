"""Numbers on their way between a GPU and the host, which has other things to do meanwhile."""

from typing import Any

import torch
from torch import Tensor


class Arriving:
    """A number, or a few of them, that were launched to the host, and are waited for when read.

    Only what was launched so far is waited for, and not what a GPU is told to do from now on.

    Args:
        numbers: on the CPU, pinned if they come from a GPU; of any shape.
        device: where they come from.
    """

    def __init__(self, numbers: Tensor, device: torch.device) -> None:
        self._numbers = numbers
        self._arrival: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrival = torch.cuda.current_stream(device).record_event()

    def read(self) -> Any:
        """The number, or a list of them."""
        return self.tensor().tolist()

    def tensor(self) -> Tensor:
        """The same as a tensor on the CPU."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers


class OnTheWay(Arriving):
    """The same of numbers that are copied to the host from now on.

    Args:
        numbers: small, of any shape; may be overwritten by what is launched from now on.
    """

    def __init__(self, numbers: Tensor) -> None:
        # Into pinned memory: any other would be waited for.
        super().__init__(numbers.to("cpu", non_blocking=True, copy=True), numbers.device)


def sent(numbers: Tensor, like: Tensor) -> Tensor:
    """A few numbers of the host where another tensor is, in its dtype; not waited for."""
    rounded = numbers.to(like.dtype)
    if like.is_cuda:
        rounded = rounded.pin_memory()  # any other memory would be waited for
    return rounded.to(like.device, non_blocking=True)


def placed(number: float | Tensor, device: torch.device) -> Tensor:
    """A number on a device, in float64 where it is the host's; not waited for."""
    if isinstance(number, Tensor):
        return number
    # By a kernel: a copy would wait for all before it.
    return torch.full((), number, dtype=torch.float64, device=device)
