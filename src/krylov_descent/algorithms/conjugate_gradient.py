"""Conjugate gradients with the stopping rule and the iterates of Martens (2010), for Hessian-Free.

Minimises a quadratic that is known only through products v → Av,

    φ(x) = ½ xᵀAx + gᵀx,        so it solves Ax = -g,

preconditioned with any M ≈ A that is cheap to invert. CG does not run to the solution: an iteration
that hardly adds to the decrease of φ is not worth its product. φ is only a model of the objective.
The best iterate for the objective may come long before the best one for φ, so iterates from the
whole run are returned.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

VectorMap = Callable[[Tensor], Tensor]

# Progress is measured over the last 1/GAP_DIVISOR of the iterations, but at least SMALLEST_GAP.
GAP_DIVISOR, SMALLEST_GAP = 10, 10
# The first iterate that is kept, and the ratio of each kept iterate to the one before.
GRID_START, GRID_GROWTH = 5.0, 1.3


class CGStop(StrEnum):
    """Why conjugate gradients stopped, as a sentence."""

    STALLED = "an iteration of CG no longer adds enough to the decrease of the quadratic"
    ITERATION_LIMIT = "CG reached its iteration limit"
    SOLVED = "CG solved the system"
    NEGATIVE_CURVATURE = "CG met a direction in which the curvature is not positive"
    NOT_FINITE = "CG met a number that is NaN or infinite"


@dataclass(frozen=True, slots=True)
class CGIterate:
    """An iterate."""

    iteration: int
    point: Tensor  # x [n]
    value: float  # φ(x)


@dataclass(frozen=True, slots=True)
class CGResult:
    """The kept iterates in order, at least one. The last one is where CG ended.

    All of them are finite, unless φ is not finite at the start.
    """

    iterates: tuple[CGIterate, ...]
    stop: CGStop

    @property
    def last(self) -> CGIterate:
        """Where CG ended; the start itself if CG made no iteration."""
        return self.iterates[-1]


def iterate_grid() -> Iterator[int]:
    """The iterations whose point is kept: 5, 7, 9, 11, 15, 19, 25, …, ×1.3 and rounded up."""
    position = GRID_START
    while True:
        yield math.ceil(position)
        position *= GRID_GROWTH


def has_stalled(values: Sequence[float], tolerance: float) -> bool:
    """Martens' stopping rule, given φ after iterations 1 … i.

    With k = max(10, ⌈i/10⌉), stop when i > k, φᵢ < 0 and (φᵢ - φᵢ₋ₖ)/φᵢ < k·tolerance. Then each of
    the last k iterations brought less than the tolerance on average, relative to the whole
    decrease.
    """
    i = len(values)
    k = max(SMALLEST_GAP, math.ceil(i / GAP_DIVISOR))
    if i <= k or values[-1] >= 0:
        return False
    return (values[-1] - values[-1 - k]) / values[-1] < k * tolerance


def conjugate_gradient(
    product: VectorMap,
    gradient: Tensor,
    *,
    solve: VectorMap,
    start: Tensor | None = None,
    max_iterations: int = 250,
    tolerance: float = 5e-4,
    agreed: VectorMap = lambda numbers: numbers,
) -> CGResult:
    """Minimise φ(x) = ½ xᵀAx + gᵀx approximately.

    Args:
        product: v → Av [n], symmetric. If vᵀAv ≤ 0 for a direction v, the quadratic has no minimum,
            and CG stops at the iterate before.
        gradient: g [n].
        solve: v → M⁻¹v [n], the preconditioner; symmetric positive definite.
        start: x₀ [n]; zero if not given.
        max_iterations: the most iterations.
        tolerance: see `has_stalled`. With 0 only the iteration limit, or the exact solution, stops
            CG.
        agreed: called with inner products and values [m], returns the numbers to use. If several
            processes run the same iterations, these are the numbers of one process.

    Cost: one product and one M⁻¹ an iteration, and one more product for a start. The host reads the
    device once an iteration. Memory: 7 vectors [n] and one for each kept iterate, of which there
    are 16 after 250 iterations.

    Raises:
        ValueError: `max_iterations` or `tolerance` is out of range.
    """
    if max_iterations < 1:
        raise ValueError(f"`max_iterations` must be at least 1, found {max_iterations}")
    if not 0 <= tolerance < math.inf:
        raise ValueError(f"`tolerance` must be a finite number of at least 0, found {tolerance}")
    # The residual r is the gradient of φ, and φ(x) = ½ xᵀ(r + g).
    if start is None:
        x, residual = torch.zeros_like(gradient), gradient.clone()
    else:
        x, residual = start.clone(), product(start) + gradient
    preconditioned = solve(residual)
    direction = -preconditioned
    alignment = residual @ preconditioned  # rᵀM⁻¹r
    numbers = agreed(torch.stack([(x @ (residual + gradient)) / 2, alignment]))
    alignment = numbers[1]
    value, size = numbers.tolist()
    current = CGIterate(0, x, value)
    if not (math.isfinite(value) and math.isfinite(size)):
        return CGResult((current,), CGStop.NOT_FINITE)

    kept: list[CGIterate] = []
    values: list[float] = []
    grid = iterate_grid()
    next_kept = next(grid)
    stop = CGStop.SOLVED if size == 0 else None
    while stop is None:
        image = product(direction)
        curvature = agreed(direction @ image)
        length = alignment / curvature
        x = torch.addcmul(current.point, direction, length)
        residual.addcmul_(image, length)
        preconditioned = solve(residual)
        previous_alignment, alignment = alignment, residual @ preconditioned
        numbers = agreed(torch.stack([curvature, (x @ (residual + gradient)) / 2, alignment]))
        alignment = numbers[2]
        bend, value, size = numbers.tolist()
        if bend <= 0:
            stop = CGStop.NEGATIVE_CURVATURE
            break
        if not all(map(math.isfinite, (bend, value, size))):
            stop = CGStop.NOT_FINITE
            break

        current = CGIterate(current.iteration + 1, x, value)
        values.append(value)
        if current.iteration == next_kept:
            kept.append(current)
            next_kept = next(grid)
        if size == 0:
            stop = CGStop.SOLVED
        elif has_stalled(values, tolerance):
            stop = CGStop.STALLED
        elif current.iteration == max_iterations:
            stop = CGStop.ITERATION_LIMIT
        direction.mul_(alignment / previous_alignment).sub_(preconditioned)
    if not kept or kept[-1] is not current:
        kept.append(current)
    return CGResult(tuple(kept), stop)
