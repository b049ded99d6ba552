"""Dense BFGS for a few dozen variables, the inner minimiser of KSD (the paper's Algorithm 3).

In the coordinates of KSD's inner problem the Hessian is roughly the identity (the Cholesky factor
at the end of the paper's Algorithm 2 serves this purpose). So the inverse Hessian starts as the
identity, and the first step tried is 1.

Values carry noise, and a large constant may hide the progress that matters (the cross-entropy of
grey pixels does not go to zero). So there is no relative tolerance: the search ends when the
decrease that the quadratic model predicts, ½ gᵀHg, is below the noise of a value.

Where a line search fails, there is a kink, as in ReLU nets. The search continues along the shortest
vector in the convex hull of the gradients on both sides (see `bundle`). If that fails, too, more
gradients join, until the predicted decrease is below the noise.
"""

import math
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from krylov_descent.algorithms.bundle import shortest_in_hull
from krylov_descent.algorithms.diminishing_returns import DiminishingReturns
from krylov_descent.algorithms.inverse_hessian import InverseHessian
from krylov_descent.algorithms.line_search import LineSearchResult, Trial, WolfeSearch

# A NumPy array, because on a few numbers NumPy takes a fifth of torch's time, while a GPU waits.
# Products are written with `dot`, which takes half the time of `@`.
Vector = NDArray[np.float64]

EPSILON = sys.float_info.epsilon
# The most gradients of a bundle at a kink.
MOST_GRADIENTS = 12


class StopReason(StrEnum):
    """Why the minimiser stopped, as a sentence."""

    ZERO_GRADIENT = "the gradient is zero"
    BELOW_NOISE = "the predicted decrease is below the noise of the objective"
    ITERATION_LIMIT = "the iteration limit was reached"
    LITTLE_GAIN = "the last evaluations brought less than the step's average for their work"
    NO_DECREASE = "the line search found no acceptable step"
    START_NOT_FINITE = "the value or the gradient at the start is not finite"


@dataclass(frozen=True, slots=True)
class BFGSResult:
    """The best point seen, and the cost of finding it."""

    point: Vector  # [m]
    value: float
    gradient: Vector  # [m]
    iterations: int  # line searches made
    evaluations: int  # of the function, without that at the start
    reason: StopReason


class BFGS:
    """A minimiser of a smooth function of a few dozen variables.

    It asks for the value and gradient at `point` and continues when `tell` is called with them (see
    `minimizer`). It keeps the arrays that it receives and returns; they must not be changed.

    Args:
        start: the first point [m].
        value: the value at ``start``.
        gradient: the gradient at ``start`` [m].
        max_iterations: the most line searches to make (the paper: at most 30).
        noise: standard deviation of the absolute error of one value. With 0 the search goes on to
            the limits of float64.
        returns: tells when further iterations are not worth their work; None to go on.

    Attributes:
        point: the point to evaluate [m]; after the end, the point of the result.
        result: the best point seen; None until the end.

    Cost beside the evaluations: O(m²) operations an iteration and one m × m matrix.

    Raises:
        ValueError: an argument has a wrong shape, dtype or range.
    """

    # NumPy need not warn of numbers that are not finite: the code checks for them.
    @np.errstate(over="ignore", invalid="ignore")
    def __init__(
        self,
        start: Vector,
        value: float,
        gradient: Vector,
        *,
        max_iterations: int = 30,
        noise: float = 0.0,
        returns: DiminishingReturns | None = None,
    ) -> None:
        _check_arguments(start, max_iterations, noise)
        self.max_iterations, self.noise, self._returns = max_iterations, noise, returns
        self.iterations = self.evaluations = 0
        self.point = start
        self.result: BFGSResult | None = None
        self.current = self.best = Iterate(start, value, gradient)
        self._start_value = value
        self.lowest = value  # value seen; that of the best point may be higher by the noise
        self.last_decrease = math.inf
        self.inverse_hessian = InverseHessian(len(start))
        # Gradients around the current point, where line searches failed.
        self.bundle: list[Vector] = []
        if self.current.is_finite():
            self._begin_search()
        else:
            self._finish(StopReason.START_NOT_FINITE)

    @np.errstate(over="ignore", invalid="ignore")
    def tell(self, value: float, gradient: Vector) -> None:
        """Take the value and gradient [m] at `point`, and continue to the next point or the result.

        Infinity or NaN in either means that the point is too far.

        Raises:
            RuntimeError: there is a result already.
        """
        if self.result is not None:
            raise RuntimeError(
                f"the search has ended ({self.result.reason}): read `result`, "
                "and begin another one to go on"
            )
        search = self.search
        slope = float(gradient.dot(self.direction))
        search.tell(Trial(search.step, value, slope, gradient))
        self.evaluations += 1
        if search.result is None:
            self._ask()
        else:
            self._end_search(search.result)

    def _begin_search(self) -> None:
        """Begin a line search along a new direction, or finish if there is nothing to gain."""
        gradient = self.current.gradient
        if self.bundle:
            direction = -shortest_in_hull(np.stack([gradient, *self.bundle]))
            slope = float(gradient.dot(direction))
            predicted_decrease = float(direction.dot(direction)) / 2
        else:
            direction = -self.inverse_hessian.times(gradient)
            slope = float(gradient.dot(direction))
            predicted_decrease = -slope / 2
        if not slope < 0 and not gradient.any():  # `any` takes as long as two products
            self._finish(StopReason.ZERO_GRADIENT)
        elif abs(predicted_decrease) <= self.noise:
            self._finish(StopReason.BELOW_NOISE)
        elif self.iterations == self.max_iterations:
            self._finish(StopReason.ITERATION_LIMIT)
        elif -math.inf < slope < 0:
            self.direction, self.predicted_decrease = direction, predicted_decrease
            self.search = WolfeSearch(
                Trial(0.0, self.current.value, slope, gradient),
                first_step=_first_step(self.last_decrease, predicted_decrease),
                # A value has at least the rounding of float64.
                noise=max(self.noise, EPSILON * abs(self.current.value)),
                weak=True,
            )
            self._ask()
        elif self.inverse_hessian.is_identity:  # overflow
            self._finish(StopReason.NO_DECREASE)
        else:  # overflow, or rounding made the matrix indefinite
            self.inverse_hessian.reset()
            self._begin_search()

    def _ask(self) -> None:
        self.point = self.current.point + self.search.step * self.direction

    def _end_search(self, found: LineSearchResult) -> None:
        """Move to the point that the line search found, learn from it, and search again."""
        self.iterations += 1
        previous, slope, value_error = self.current, self.search.start.slope, self.search.noise
        if found.accepted is not None:  # the last trial, at `point`
            current = Iterate(self.point, found.accepted.value, found.accepted.gradient)
        else:
            current = previous.moved(self.direction, found.best)
        self.current = current
        self.lowest = min(self.lowest, found.best.value)
        if current.value <= self.lowest + value_error:
            self.best = current
        elif found.best.value < self.best.value:
            self.best = previous.moved(self.direction, found.best)

        returns = self._returns
        if returns is not None and returns.have_come(self.evaluations, self.best.value):
            gained = self.best.value < self._start_value
            self._finish(StopReason.LITTLE_GAIN if gained else StopReason.NO_DECREASE)
        elif found.accepted is not None:
            # From the slopes, which are more exact than the values unless there is a kink between
            # them.
            by_slopes = -found.accepted.step * (slope + found.accepted.slope) / 2
            self.last_decrease = by_slopes if by_slopes > 0 else previous.value - current.value
            self.inverse_hessian.update(
                current.point - previous.point, current.gradient - previous.gradient
            )
            self.bundle.clear()
            self._begin_search()
        elif self.predicted_decrease <= value_error:
            self._finish(StopReason.BELOW_NOISE)
        elif self._widen_bundle(found.beyond, moved=current.value < previous.value):
            self._begin_search()
        else:
            self._finish(StopReason.NO_DECREASE)

    def _widen_bundle(self, beyond: Trial | None, *, moved: bool) -> bool:
        """Add the gradient behind a kink to the bundle; False if there is nothing left to try."""
        if moved:
            self.bundle.clear()
        if beyond is not None and len(self.bundle) < MOST_GRADIENTS:
            self.bundle.append(beyond.gradient)
        elif self.inverse_hessian.is_identity:
            return False
        else:  # the next search follows the gradient
            self.bundle.clear()
        self.inverse_hessian.reset()
        return True

    def _finish(self, reason: StopReason) -> None:
        self.point = self.best.point
        self.result = BFGSResult(*self.best, self.iterations, self.evaluations, reason)


def _first_step(last_decrease: float, predicted_decrease: float) -> float:
    """The natural step of 1, or less if the model predicts more than the last step achieved.

    A model that predicts more contains directions that were never tried (Nocedal & Wright, 2006,
    section 3.5). The line search would have to shrink the step, at the cost of an evaluation.
    """
    return min(1.0, 1.01 * last_decrease / predicted_decrease) or 1.0  # 0 is an underflow


class Iterate(NamedTuple):
    """A point [m] with the value and the gradient [m] there."""

    point: Vector
    value: float
    gradient: Vector

    def is_finite(self) -> bool:
        return math.isfinite(self.value) and bool(np.isfinite(self.gradient).all())

    def moved(self, direction: Vector, trial: Trial) -> Self:
        point = self.point + trial.step * direction
        return type(self)(point, trial.value, trial.gradient)


def _check_arguments(start: Vector, max_iterations: int, noise: float) -> None:
    if start.ndim != 1 or start.dtype != np.float64:
        raise ValueError(
            f"start must be a one-dimensional float64 array, got shape {start.shape}, {start.dtype}"
        )
    if max_iterations < 0:
        raise ValueError(f"max_iterations must be at least 0, got {max_iterations}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise must be finite and at least 0, got {noise}")
