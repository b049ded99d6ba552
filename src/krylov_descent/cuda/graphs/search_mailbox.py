"""A mailbox between host and GPU for the numbers of one recorded evaluation."""

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import Vector


class SearchMailbox:
    """Coefficients c for an evaluation at θ + Vc, and the value and Vᵀ∇f that come of it.

    Both are in memory of the host, pinned if there is a GPU, and the recording reads and writes
    them there. There is one place for each: coefficients are sent when the evaluation before was
    waited for, or is never asked for. Keep the mailbox until all that was launched has ended.

    Args:
        rows: of the basis V.
        like: a tensor in the dtype of the coefficients, on the GPU.

    Attributes:
        numbers: value and Vᵀ∇f of the last evaluation that has ended [1 + rows], float64.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self._device = like.device
        self._sent = torch.zeros(rows, dtype=like.dtype, pin_memory=like.is_cuda)
        self.numbers = torch.zeros(1 + rows, dtype=torch.float64, pin_memory=like.is_cuda)

    def send(self, coefficients: Vector) -> None:
        """Write c [r] of the first r rows, before the evaluation is launched."""
        write(coefficients, self._sent.numpy())

    def coefficients(self) -> Tensor:
        """c [rows] on the GPU; the first operation of a recording."""
        return self._sent.to(self._device, non_blocking=True)

    def bring(self, value: Tensor, projected: Tensor) -> None:
        """Value and Vᵀ∇f [rows] to the host; the last operation of a recording."""
        numbers = torch.cat([value.unsqueeze(0), projected.double()])
        self.numbers.copy_(numbers, non_blocking=True)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found by the search
def write(numbers: Vector, place: Vector) -> None:
    """Numbers, and zeros behind them, to where a recording fetches them."""
    place[: len(numbers)] = numbers
    place[len(numbers) :] = 0
