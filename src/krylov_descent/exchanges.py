"""The numbers of an evaluation that is recorded, between host and GPU."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from krylov_descent.bfgs import Trying, Vector
from krylov_descent.tensor_cores.transfers import brought, fetched


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the points that a search asks for after a trial depend on.

    Attributes:
        trying: the trial.
        to_coordinates: from Vᵀ∇f to the gradient that BFGS sees [r, r].
    """

    trying: Trying
    to_coordinates: Vector


class Exchange(Protocol):
    """Coefficients c of a point, and the value and Vᵀ∇f there, of a basis of so many rows.

    Evaluations are numbered. Their numbers stay for a while, if there is more than one place.

    Attributes:
        foresees: whether an evaluation leaves the point after it on the GPU.
    """

    foresees: bool

    def coefficients(self) -> Tensor:
        """What is recorded first: c [rows] on the GPU."""

    def bring(self, value: Tensor, projected: Tensor) -> None:
        """What is recorded last: value and Vᵀ∇f [rows] go to the host."""

    def send(self, number: int, coefficients: Vector, ahead: Ahead | None) -> None:
        """What the host does before it launches an evaluation at c [r] of the first r rows.

        The one before, of those that were sent, must have been read, or is never asked for.

        Args:
            number: of the evaluation.
            coefficients: c.
            ahead: what the point after it depends on, if that may be asked for.
        """

    def numbers(self, number: int) -> Tensor:
        """Where those of an evaluation are brought to: value and Vᵀ∇f [1 + rows], pinned."""

    def next_point(self, number: int) -> Vector:
        """And the coefficients of the point after it [rows], where there is one."""


class OnePlace:
    """One evaluation at a time.

    Args:
        rows: of the basis.
        like: a tensor in the dtype of the coefficients, on the GPU.
    """

    foresees = False

    def __init__(self, rows: int, like: Tensor) -> None:
        self._device = like.device
        self._coming = torch.zeros(rows, dtype=like.dtype, pin_memory=like.is_cuda)
        self._going = torch.zeros(1 + rows, dtype=torch.float64, pin_memory=like.is_cuda)

    def coefficients(self) -> Tensor:
        return fetched(self._coming, self._device)

    def bring(self, value: Tensor, projected: Tensor) -> None:
        brought(torch.cat([value.unsqueeze(0), projected.double()]), self._going)

    def send(self, number: int, coefficients: Vector, ahead: Ahead | None) -> None:
        write(coefficients, self._coming.numpy())

    def numbers(self, number: int) -> Tensor:
        return self._going

    def next_point(self, number: int) -> Vector:
        raise NotImplementedError


def exchange_for(rows: int, like: Tensor, *, tensor_cores: bool) -> Exchange:
    """What a recording has for its numbers.

    Args:
        rows: of the basis.
        like: a tensor in the dtype of the coefficients, on the GPU.
        tensor_cores: whether it is made for them.
    """
    if tensor_cores and like.dtype is torch.float32:
        from krylov_descent.tensor_cores.foresight import MOST, Foresight  # needs Triton

        if rows <= MOST:
            return Foresight(rows, like.device)
    return OnePlace(rows, like)


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found by the search
def write(numbers: Vector | list[float], place: Vector) -> None:
    """Numbers, and zeros behind them, to where a recording fetches them."""
    place[: len(numbers)] = numbers
    place[len(numbers) :] = 0
