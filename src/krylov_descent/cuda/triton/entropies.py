"""The cross entropy of sigmoids and its derivative, by one kernel."""

from dataclasses import dataclass

from torch import Tensor

from krylov_descent.cuda.triton import entropy_kernels as kernels
from krylov_descent.cuda.triton.launching import launch, or_else
from krylov_descent.cuda.triton.split_fp16 import Halves, filled_up, pointers

# So many numbers of a row are gone through side by side.
BLOCK = 1024
# Of a derivative the kernel has so many tensors, in place of which any do where it is not wanted.
TENSORS = 8


@dataclass(frozen=True, slots=True)
class Delta:
    """Room for the derivative towards x, δ, times a factor for each row; and what its scale is of.

    Attributes:
        values: for δ itself [rows, columns], without gaps.
        halves: for those of δ, and its bound.
        factors: [rows], evenly apart.
        bound_of_factors: [1].
        bound_of_target: [1].
    """

    values: Tensor
    halves: Halves
    factors: Tensor
    bound_of_factors: Tensor
    bound_of_target: Tensor


def cross_entropy(
    x: Tensor,
    target: Tensor,
    share: float = 1.0,
    *,
    losses: Tensor | None = None,
    delta: Delta | None = None,
) -> None:
    """Between the sigmoid and a target, row by row: whatever there is room for.

    Args:
        x: before the sigmoid [rows, columns], without gaps.
        target: like it.
        share: of the sum over columns that is a row's loss.
        losses: for those [rows].
        delta: for the derivative.
    """
    rows, columns = x.shape
    unit = 4 if columns % 4 == 0 else 1  # as many as can be read at once
    if delta is None:
        tensors, programs, step, with_low = (x,) * TENSORS, rows, 0, False
    else:
        tensors, programs = _tensors(delta), len(delta.halves.high)
        step, with_low = delta.factors.stride(0), delta.halves.low is not None
    numbers = rows, columns // unit, filled_up(columns), step, share, int(with_low)
    args = x, target, or_else(losses, x), *tensors, *numbers
    constants = losses is not None, delta is not None, unit, BLOCK
    launch(kernels.cross_entropy, (programs, 1), args, constants)


def _tensors(delta: Delta) -> tuple[Tensor, ...]:
    halves = delta.halves
    assert halves.bound is not None
    bounds = halves.bound, delta.bound_of_factors, delta.bound_of_target
    return delta.values, *pointers(halves), halves.unscale, delta.factors, *bounds
