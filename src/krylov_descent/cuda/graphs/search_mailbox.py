"""A mailbox between host and GPU for the numbers of one recorded evaluation."""

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import Vector


class SearchMailbox:
    """Host memory for the coefficients c, and for the value and Vᵀ∇f of an evaluation at θ + Vc.

    The memory is pinned if there is a GPU; the recording reads and writes it. It holds one
    evaluation: send coefficients only if the previous result was read, or never will be. Keep the
    mailbox until all launched evaluations have ended.

    Args:
        rows: number of rows of the basis V.
        like: a tensor in the dtype of the coefficients, on the GPU.

    Attributes:
        numbers: value and Vᵀ∇f of the last finished evaluation [1 + rows], float64.
    """

    def __init__(self, rows: int, like: Tensor) -> None:
        self._device = like.device
        self._sent = torch.zeros(rows, dtype=like.dtype, pin_memory=like.is_cuda)
        self.numbers = torch.zeros(1 + rows, dtype=torch.float64, pin_memory=like.is_cuda)

    def send(self, coefficients: Vector) -> None:
        """Write c [r] of the first r rows, before the evaluation is launched."""
        write(coefficients, self._sent.numpy())

    def coefficients(self) -> Tensor:
        """Copy c [rows] to the GPU; the first operation of a recording."""
        return self._sent.to(self._device, non_blocking=True)

    def bring(self, value: Tensor, projected: Tensor) -> None:
        """Copy the value and Vᵀ∇f [rows] to the host; the last operation of a recording."""
        numbers = torch.cat([value.unsqueeze(0), projected.double()])
        self.numbers.copy_(numbers, non_blocking=True)


@np.errstate(over="ignore", invalid="ignore")  # the search checks for non-finite numbers
def write(numbers: Vector, place: Vector) -> None:
    """Write numbers, padded with zeros, to the host memory that a recording reads."""
    place[: len(numbers)] = numbers
    place[len(numbers) :] = 0
