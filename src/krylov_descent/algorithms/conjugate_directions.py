"""Nonlinear conjugate gradients for many variables (Nocedal & Wright 2006, Section 5.2).

Directions are d = -g + βd_prev. A line search for the strong Wolfe conditions finds the step along
each direction. On a quadratic with exact line searches the directions are those of linear CG. On
other functions the method has to restart from the gradient now and then.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
from torch import Tensor

from krylov_descent.algorithms.bundle import hull_weights_from
from krylov_descent.algorithms.line_search import LineSearchResult, Trial, WolfeSearch

Formula = Literal["polak-ribiere", "hestenes-stiefel"]
Agreed = Callable[[float], float]
"""A number computed from vectors → the number to use; all processes get that of one process."""

# A direction must have at least this fraction of the slope along the gradient (the condition of
# Gilbert & Nocedal 1992 for convergence). Otherwise the gradient is used.
LEAST_DESCENT = 0.01
# The most gradients of a bundle at a kink.
MOST_GRADIENTS = 6


class StopReason(StrEnum):
    """Why the minimiser stopped, as a sentence."""

    ITERATION_LIMIT = "the iterations asked for were made"
    ZERO_GRADIENT = "the gradient is zero"
    NO_DECREASE = "the line searches along the gradient and around it found no further decrease"


@dataclass(frozen=True, slots=True)
class Memory:
    """The state that an iteration hands to the next."""

    direction: Tensor  # d_prev [n]
    gradient: Tensor  # g_prev [n]
    promised: float  # slope times step of the last line search, negative; scales the next step
    count: int  # directions since the last restart; 0 if a restart is due


@dataclass(frozen=True, slots=True)
class NonlinearCGResult:
    """Where the iterations led, and their cost."""

    point: Tensor  # [n]
    value: float
    memory: Memory | None
    iterations: int  # line searches made
    evaluations: int  # of the function, without that at the start
    reason: StopReason


def _own(number: float) -> float:
    return number


class ConjugateDirections:
    """A minimiser that makes some iterations of nonlinear conjugate gradients.

    It asks for the value and gradient at `point` and continues when `tell` is called with them (see
    `minimizer`). It keeps the tensors that it receives; they must not be changed.

    Args:
        start: the first point [n].
        value: the value at the start, finite.
        gradient: the gradient at the start [n], finite.
        formula: the formula for β; see `conjugacy`.
        memory: the state after earlier iterations, if there were any.
        max_iterations: the most line searches to make.
        slope_tolerance: the fraction of the first slope that a line search may leave.
        noise: standard deviation of the absolute error of one value.
        agreed: called with each number, other than the values, on which decisions depend. If
            several processes run the same iterations, it returns the number of one process.

    Attributes:
        result: where the iterations led; None until the end.

    The method restarts from the gradient if β is zero, if the direction hardly descends, after n
    directions, and if a line search failed. If a line search along the gradient fails, there is a
    kink. Then the method follows the shortest vector of a bundle of gradients (see `bundle`).

    Memory: 9 vectors [n] with `point` and its gradient. At kinks, the gradients of a bundle in
    addition.
    """

    def __init__(
        self,
        start: Tensor,
        value: float,
        gradient: Tensor,
        *,
        formula: Formula = "polak-ribiere",
        memory: Memory | None = None,
        max_iterations: int = 20,
        slope_tolerance: float = 0.1,
        noise: float = 0.0,
        agreed: Agreed = _own,
    ) -> None:
        self.formula: Formula = formula
        self.max_iterations, self.slope_tolerance, self.noise = (
            max_iterations,
            slope_tolerance,
            noise,
        )
        self.agreed = agreed
        self.iterations = self.evaluations = 0
        self.result: NonlinearCGResult | None = None
        self.base, self.value, self.gradient = start, value, gradient  # of the line search
        self.memory = memory
        # Gradients around the base, where line searches failed.
        self.bundle: list[Tensor] = []
        self._begin_search()

    @property
    def point(self) -> Tensor:
        """The point to evaluate [n]; after the end, the point of the result.

        Computed at each reading, so that it takes no memory between two evaluations.
        """
        if self.result is not None:
            return self.result.point
        return self.base + self.search.step * self.direction

    def tell(self, value: float, gradient: Tensor) -> None:
        """Take the value and gradient [n] at `point`, and continue to the next point or the result.

        Infinity or NaN in either means that the point is too far.

        Raises:
            RuntimeError: there is a result already.
        """
        if self.result is not None:
            raise RuntimeError(
                f"the iterations have ended ({self.result.reason}): read `result`, "
                "and begin others with its memory to go on"
            )
        slope = self.agreed(float(gradient @ self.direction))
        self.search.tell(Trial(self.search.step, value, slope, gradient))
        self.evaluations += 1
        if self.search.result is not None:
            self._end_search(self.search.result)
            del self.search  # frees up to two gradients before the next direction is made
            if self.result is None:
                self._begin_search()

    def _begin_search(self) -> None:
        """Begin a line search along a new direction, or finish if there is nothing to gain."""
        if self.iterations >= self.max_iterations:
            self._finish(StopReason.ITERATION_LIMIT)
            return
        gradient, agreed = self.gradient, self.agreed
        steepest = -agreed(float(gradient @ gradient))
        if steepest == 0:  # also where the square of a tiny gradient underflows
            self._finish(StopReason.ZERO_GRADIENT)
            return
        if self.bundle:
            self.direction = -_shortest_in_hull([gradient, *self.bundle], agreed)
            slope, self.conjugate = agreed(float(gradient @ self.direction)), False
            if slope >= 0:  # the shortest vector is zero
                self._finish(StopReason.NO_DECREASE)
                return
        else:
            self.direction, slope, self.conjugate = _next_direction(
                self.formula, gradient, steepest, self.memory, agreed
            )
        self.search = WolfeSearch(
            Trial(0.0, self.value, slope, gradient),
            first_step=first_step(slope, gradient, self.memory, agreed),
            noise=max(self.noise, sys.float_info.epsilon * abs(self.value)),
            curvature=self.slope_tolerance,
        )

    def _end_search(self, found: LineSearchResult) -> None:
        """Move to the point that the line search found, or plan another direction if it failed."""
        self.iterations += 1
        memory, trial = self.memory, found.accepted or found.best
        if trial.step == 0:
            if self.conjugate:
                assert memory is not None
                self.memory = replace(memory, count=0)
            elif found.beyond is None or len(self.bundle) == MOST_GRADIENTS:
                self._finish(StopReason.NO_DECREASE)
            else:
                self.bundle.append(found.beyond.gradient)
            return
        self.bundle.clear()
        count = memory.count + 1 if memory is not None and self.conjugate else 1
        due = found.accepted is None or count >= self.gradient.numel()
        promised = self.search.start.slope * trial.step
        self.memory = Memory(self.direction, self.gradient, promised, 0 if due else count)
        self.base = self.base + trial.step * self.direction
        self.value, self.gradient = trial.value, trial.gradient

    def _finish(self, reason: StopReason) -> None:
        self.result = NonlinearCGResult(
            self.base, self.value, self.memory, self.iterations, self.evaluations, reason
        )


def conjugacy(formula: Formula, gradient: Tensor, memory: Memory, agreed: Agreed = _own) -> float:
    """β, with y = g - g_prev; 0, which is a restart, if the formula is not defined.

    Polak and Ribière's β with a plus is max(0, gᵀy / ‖g_prev‖²). Hestenes and Stiefel's β is gᵀy /
    d_prevᵀy.
    """
    change = gradient - memory.gradient
    numerator = agreed(float(gradient @ change))
    if formula == "polak-ribiere":
        numerator = max(0.0, numerator)
        denominator = agreed(float(memory.gradient @ memory.gradient))
    else:
        denominator = agreed(float(memory.direction @ change))
    # ‖g_prev‖² may underflow to 0. The Wolfe conditions make d_prevᵀy positive, unless the data
    # changed.
    return numerator / denominator if denominator > 0 else 0.0


def first_step(
    slope: float, gradient: Tensor, memory: Memory | None, agreed: Agreed = _own
) -> float:
    """The first step to try: one that promises as much as the last step, or one of length 1."""
    step = memory.promised / slope if memory is not None else 0.0
    return step if 0 < step < math.inf else 1 / agreed(float(gradient.norm()))


def _next_direction(
    formula: Formula, gradient: Tensor, steepest: float, memory: Memory | None, agreed: Agreed
) -> tuple[Tensor, float, bool]:
    """The direction d [n], its slope, and whether d is conjugate (False: a restart).

    `steepest` is the slope along -g.
    """
    if memory is not None and memory.count > 0:
        beta = conjugacy(formula, gradient, memory, agreed)
        if beta != 0:
            direction = beta * memory.direction - gradient
            slope = agreed(float(gradient @ direction))
            if slope <= LEAST_DESCENT * steepest:
                return direction, slope, True
    return -gradient, steepest, False


def _shortest_in_hull(vectors: list[Tensor], agreed: Agreed) -> Tensor:
    """The shortest vector [n] in the convex hull of some vectors [n]."""
    products = np.array([[agreed(float(a @ b)) for b in vectors] for a in vectors])
    weights = hull_weights_from((products + products.T) / 2)
    pieces = [float(weight) * vector for weight, vector in zip(weights, vectors, strict=True)]
    return sum(pieces[1:], start=pieces[0])
