"""Asynchronous transfers of a few numbers between a GPU and the host."""

from typing import Any

import torch
from torch import Tensor


class Arriving:
    """A future of numbers whose copy to the host is launched already.

    Reading waits for the kernels launched before the constructor, not for later ones.

    Args:
        numbers: target of the copy on the CPU, of any shape; pinned if it comes from a GPU.
        device: source of the copy.
    """

    def __init__(self, numbers: Tensor, device: torch.device) -> None:
        self._numbers = numbers
        self._arrival: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._arrival = torch.cuda.current_stream(device).record_event()

    def read(self) -> Any:
        """Wait; returns a number, or a nested list of numbers."""
        return self.tensor().tolist()

    def tensor(self) -> Tensor:
        """Wait; returns the numbers as a tensor on the CPU."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers


class OnTheWay(Arriving):
    """A future of numbers on a device, which launches their copy to the host.

    Args:
        numbers: a small tensor of any shape; kernels launched later may overwrite it.
    """

    def __init__(self, numbers: Tensor) -> None:
        # Into pinned memory: a copy to other memory would synchronise.
        super().__init__(numbers.to("cpu", non_blocking=True, copy=True), numbers.device)


def placed(number: float | Tensor, device: torch.device) -> Tensor:
    """A number as a tensor on a device, without synchronising; a host number in float64."""
    if isinstance(number, Tensor):
        return number
    # By a kernel: a copy would synchronise.
    return torch.full((), number, dtype=torch.float64, device=device)
