"""Dense BFGS for a few dozen variables, the inner minimiser of KSD (the paper's Algorithm 3).

The coordinates in which KSD poses its inner problem make the Hessian roughly the identity (the
paper's Algorithm 2 ends with a Cholesky factor for just this), so the inverse Hessian starts as
the identity and the first step tried is 1.

Values carry noise, and a large constant may hide the progress that matters (the cross-entropy of
grey pixels does not go to zero). So there is no relative tolerance: the search ends when the
decrease that the quadratic model predicts, ½ gᵀHg, is below the noise of a value.

Where a line search fails, there is a kink, as ReLU nets have them. The search goes on along the
shortest vector in the hull of the gradients on both sides (see `bundle`), with more of them if that
fails, too, until it predicts nothing beyond the noise.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import numpy as np
from numpy.typing import NDArray

from krylov_descent.algorithms.bundle import shortest_in_hull
from krylov_descent.algorithms.line_search import Trial, wolfe_search

# Of few numbers: NumPy's operations on them take a fifth of torch's time, and a GPU waits for them.
Vector = NDArray[np.float64]
Function = Callable[[Vector], tuple[float, Vector]]
"""From a point [m] to the value and the gradient [m] there."""

EPSILON = sys.float_info.epsilon
# Of a bundle at a kink.
MOST_GRADIENTS = 12


class StopReason(StrEnum):
    """Why the minimiser stopped, as a sentence."""

    ZERO_GRADIENT = "the gradient is zero"
    BELOW_NOISE = "the predicted decrease is below the noise of the objective"
    ITERATION_LIMIT = "the iteration limit was reached"
    NO_DECREASE = "the line search found no acceptable step"
    START_NOT_FINITE = "the value or the gradient at the start is not finite"


@dataclass(frozen=True, slots=True)
class BFGSResult:
    """The best point seen, and what it took to find it."""

    point: Vector  # [m]
    value: float
    gradient: Vector  # [m]
    iterations: int  # line searches made
    evaluations: int  # calls of the function
    reason: StopReason


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found, and is no accident
def minimize_bfgs(
    function: Function,
    start: Vector,
    *,
    initial: tuple[float, Vector] | None = None,
    max_iterations: int = 30,
    noise: float = 0.0,
) -> BFGSResult:
    """Minimise a smooth function of a few dozen variables.

    Args:
        function: value and gradient at a point; infinity or NaN say that the point is too far.
            What it raises is passed on.
        start: where to begin, [m].
        initial: value and gradient at ``start`` where they are known; saves one evaluation.
        max_iterations: the most line searches to make (the paper: at most 30).
        noise: standard deviation of the absolute error of one value. With 0 the search goes on
            to the limits of float64.

    Cost beside the evaluations: O(m²) operations an iteration and one m × m matrix.
    """
    _check_arguments(start, max_iterations, noise)
    iterations = 0
    evaluations = 0 if initial is not None else 1
    value, gradient = initial if initial is not None else function(start)
    current = best = _Iterate(start, value, gradient)
    lowest = current.value  # of all seen; the best point may lie above it by the noise
    last_decrease = math.inf
    inverse_hessian = _InverseHessian(len(start))
    bundle: list[Vector] = []  # gradients around the current point, where line searches failed

    def finish(reason: StopReason) -> BFGSResult:
        return BFGSResult(best.point, best.value, best.gradient, iterations, evaluations, reason)

    if not current.is_finite():
        return finish(StopReason.START_NOT_FINITE)
    while True:
        if bundle:
            direction = -shortest_in_hull(np.stack([current.gradient, *bundle]))
            predicted_decrease = float(direction @ direction) / 2
        else:
            direction = -inverse_hessian.times(current.gradient)
            predicted_decrease = -float(current.gradient @ direction) / 2
        slope = float(current.gradient @ direction)
        if not current.gradient.any():
            return finish(StopReason.ZERO_GRADIENT)
        if abs(predicted_decrease) <= noise:
            return finish(StopReason.BELOW_NOISE)
        if iterations == max_iterations:
            return finish(StopReason.ITERATION_LIMIT)
        if not -math.inf < slope < 0:  # overflow, or rounding made the matrix indefinite
            if inverse_hessian.is_identity:
                return finish(StopReason.NO_DECREASE)
            inverse_hessian.reset()
            continue

        # No value is more exact than float64 can write it, whatever the noise.
        value_error = max(noise, EPSILON * abs(current.value))
        search = wolfe_search(
            _along(function, current, direction),
            Trial(0.0, current.value, slope, current.gradient),
            first_step=_first_step(last_decrease, predicted_decrease),
            noise=value_error,
            weak=True,
        )
        iterations += 1
        evaluations += search.evaluations

        previous = current
        current = previous.moved(direction, search.accepted or search.best)
        lowest = min(lowest, search.best.value)
        if current.value <= lowest + value_error:
            best = current
        elif search.best.value < best.value:
            best = previous.moved(direction, search.best)

        if search.accepted is not None:
            # By the slopes, which are more exact than the values, unless there is a kink between.
            by_slopes = -search.accepted.step * (slope + search.accepted.slope) / 2
            last_decrease = by_slopes if by_slopes > 0 else previous.value - current.value
            inverse_hessian.update(
                current.point - previous.point, current.gradient - previous.gradient
            )
            bundle.clear()
        elif predicted_decrease <= value_error:
            return finish(StopReason.BELOW_NOISE)
        else:
            # There is a kink: next comes the direction that descends on both of its sides.
            if current.value < previous.value:
                bundle.clear()
            if search.beyond is None or len(bundle) == MOST_GRADIENTS:
                if inverse_hessian.is_identity:
                    return finish(StopReason.NO_DECREASE)
                bundle.clear()
            else:
                bundle.append(search.beyond.gradient)
            inverse_hessian.reset()


def _first_step(last_decrease: float, predicted_decrease: float) -> float:
    """The natural step of 1, or less if its prediction goes beyond what the last step achieved.

    A model that predicts more than that has directions in it that were never tried (Nocedal &
    Wright, 2006, section 3.5). The search would shrink the step at the cost of an evaluation.
    """
    return min(1.0, 1.01 * last_decrease / predicted_decrease) or 1.0  # 0 is an underflow


@dataclass(frozen=True, slots=True)
class _Iterate:
    point: Vector
    value: float
    gradient: Vector

    def is_finite(self) -> bool:
        return math.isfinite(self.value) and bool(np.isfinite(self.gradient).all())

    def moved(self, direction: Vector, trial: Trial) -> Self:
        point = self.point + trial.step * direction
        return type(self)(point, trial.value, trial.gradient)


class _InverseHessian:
    """The BFGS approximation of the inverse Hessian, [m, m], positive definite."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        self.matrix = np.eye(self._size)
        self.is_identity = True

    def times(self, vector: Vector) -> Vector:
        return self.matrix @ vector

    def update(self, step: Vector, change: Vector) -> None:
        """Learn that this step caused this change of the gradient, so that H·change = step.

        Left out when the curvature along the step, stepᵀchange, is not safely positive: the
        matrix would lose its definiteness.
        """
        curvature = float(step @ change)
        if curvature <= EPSILON * math.sqrt(float(step @ step)) * math.sqrt(float(change @ change)):
            return
        if self.is_identity:
            # The usual scaling of the first matrix, but only upwards: a first direction that is
            # more curved than expected says nothing against the scale of the others, and
            # directions taken for too curved are slow to be learnt.
            self.matrix *= max(1.0, curvature / float(change @ change))
            self.is_identity = False
        image = self.matrix @ change
        weight = (1 + float(change @ image) / curvature) / curvature
        # weight·ssᵀ − (s·imageᵀ + image·sᵀ)/curvature, as one matrix and its transpose.
        half = np.multiply.outer(step, 0.5 * weight * step - image / curvature)
        self.matrix += half
        self.matrix += half.T


def _along(function: Function, start: _Iterate, direction: Vector) -> Callable[[float], Trial]:
    """The function of one variable that the line search sees."""

    def evaluate(step: float) -> Trial:
        value, gradient = function(start.point + step * direction)
        return Trial(step, value, float(gradient @ direction), gradient)

    return evaluate


def _check_arguments(start: Vector, max_iterations: int, noise: float) -> None:
    if start.ndim != 1 or start.dtype != np.float64:
        raise ValueError(
            f"start must be a one-dimensional float64 array, got shape {start.shape}, {start.dtype}"
        )
    if max_iterations < 0:
        raise ValueError(f"max_iterations must be at least 0, got {max_iterations}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise must be finite and at least 0, got {noise}")
