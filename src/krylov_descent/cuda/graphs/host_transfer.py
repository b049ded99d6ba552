"""Asynchronous transfers of a few numbers between a GPU and the host."""

import torch
from torch import Tensor

from krylov_descent.runtime.engine import Launched


def arriving(numbers: Tensor, device: torch.device) -> Launched[Tensor]:
    """The future of numbers whose copy to the host is launched already.

    Its result waits for the kernels launched so far, not for later ones.

    Args:
        numbers: target of the copy on the CPU, of any shape; pinned if it comes from a GPU.
        device: source of the copy.
    """
    if device.type != "cuda":
        return Launched.done(numbers)
    arrival = torch.cuda.current_stream(device).record_event()

    def arrived() -> Tensor:
        arrival.synchronize()
        return numbers

    return Launched(arrived)


def to_host(numbers: Tensor) -> Launched[Tensor]:
    """The future of a small tensor's copy on the host; later kernels may overwrite the tensor."""
    # Into pinned memory: a copy to other memory would synchronise.
    return arriving(numbers.to("cpu", non_blocking=True, copy=True), numbers.device)


def placed(number: float | Tensor, device: torch.device) -> Tensor:
    """A number as a tensor on a device, without synchronising; a host number in float64."""
    if isinstance(number, Tensor):
        return number
    # By a kernel: a copy would synchronise.
    return torch.full((), number, dtype=torch.float64, device=device)
