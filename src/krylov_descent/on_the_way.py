"""Numbers on their way between a GPU and the host, which has other things to do meanwhile."""

from typing import Any

import torch
from torch import Tensor


class OnTheWay:
    """A number, or a few of them, copied from now on and waited for when they are read.

    Only they are waited for, and not what a GPU was told to do after them.

    Args:
        numbers: small, of any shape; may be overwritten by what is launched from now on.
    """

    def __init__(self, numbers: Tensor) -> None:
        # Into pinned memory: any other would be waited for.
        self._numbers = numbers.to("cpu", non_blocking=True, copy=True)
        self._arrival: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._arrival = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> Any:
        """The number, or a list of them."""
        return self.tensor().tolist()

    def tensor(self) -> Tensor:
        """The same as a tensor on the CPU."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers


def sent(numbers: Tensor, like: Tensor) -> Tensor:
    """A few numbers of the host where another tensor is, in its dtype; not waited for."""
    rounded = numbers.to(like.dtype)
    if like.is_cuda:
        rounded = rounded.pin_memory()  # any other memory would be waited for
    return rounded.to(like.device, non_blocking=True)
