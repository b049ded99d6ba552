"""Nonlinear conjugate gradients for many variables (Nocedal & Wright 2006, Section 5.2).

Directions are d = -g + βd_prev, and a line search for the strong Wolfe conditions says how far to
go along each. On a quadratic with exact line searches they are the conjugate directions of linear
CG; elsewhere they have to begin anew from the gradient now and then.
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
from krylov_descent.algorithms.line_search import Trial, wolfe_search

Formula = Literal["polak-ribiere", "hestenes-stiefel"]
Function = Callable[[Tensor], tuple[float, Tensor]]
"""From a point [n] to the value and the gradient [n] there."""
Agreed = Callable[[float], float]
"""From a number that vectors gave to the one to go on with: of several processes, one's."""

# A direction must descend at least by this part of what the gradient would (the condition of
# Gilbert & Nocedal 1992 for convergence), else it is dropped for the gradient.
LEAST_DESCENT = 0.01
# Of a bundle at a kink.
MOST_GRADIENTS = 6


class StopReason(StrEnum):
    """Why the minimiser stopped, as a sentence."""

    ITERATION_LIMIT = "the iterations asked for were made"
    ZERO_GRADIENT = "the gradient is zero"
    NO_DECREASE = "the line searches along the gradient and around it found no further decrease"


@dataclass(frozen=True, slots=True)
class Memory:
    """What an iteration hands to the next."""

    direction: Tensor  # d_prev [n]
    gradient: Tensor  # g_prev [n]
    promised: float  # slope times step of the last line search: negative, gives the next its scale
    count: int  # directions since the last restart; 0 says that one is due


@dataclass(frozen=True, slots=True)
class NonlinearCGResult:
    """Where the iterations led, and what they took."""

    point: Tensor  # [n]
    value: float
    memory: Memory | None
    iterations: int  # line searches made
    evaluations: int  # calls of the function
    reason: StopReason


def _own(number: float) -> float:
    return number


def minimize_nonlinear_cg(
    function: Function,
    start: Tensor,
    initial: tuple[float, Tensor],
    *,
    formula: Formula = "polak-ribiere",
    memory: Memory | None = None,
    max_iterations: int = 20,
    slope_tolerance: float = 0.1,
    noise: float = 0.0,
    agreed: Agreed = _own,
) -> NonlinearCGResult:
    """Go on with conjugate gradients for some iterations.

    Args:
        function: value and gradient at a point; infinity or NaN mean that the point is too far.
        start: where to begin [n].
        initial: value and gradient there, both finite.
        formula: of β; see `conjugacy`.
        memory: of the iterations before, where there were any.
        max_iterations: the most line searches to make.
        slope_tolerance: the part of the first slope that a line search may leave over.
        noise: standard deviation of the absolute error of one value.
        agreed: called with each number that decisions follow from, besides the values; where
            several processes run the same iterations it returns that of one of them.

    It restarts from the gradient where β is zero, where the direction hardly descends, after n
    directions, and where a line search failed. Where one along the gradient fails, there is a kink,
    and it goes on along the shortest vector of a bundle of gradients (see `bundle`).

    Memory: 9 vectors [n], and as many more as a bundle has, at kinks.
    """
    point, (value, gradient) = start, initial
    bundle: list[Tensor] = []  # gradients around the point, where line searches failed
    iterations = evaluations = 0
    reason = StopReason.ITERATION_LIMIT
    while iterations < max_iterations:
        steepest = -agreed(float(gradient @ gradient))
        if steepest == 0:  # also where the square of a tiny gradient underflows
            reason = StopReason.ZERO_GRADIENT
            break
        if bundle:
            direction = -_shortest_in_hull([gradient, *bundle], agreed)
            slope, conjugate = agreed(float(gradient @ direction)), False
            if slope >= 0:  # the shortest vector is zero
                reason = StopReason.NO_DECREASE
                break
        else:
            direction, slope, conjugate = _next_direction(
                formula, gradient, steepest, memory, agreed
            )
        search = wolfe_search(
            _along(function, point, direction, agreed),
            Trial(0.0, value, slope, gradient),
            first_step=first_step(slope, gradient, memory, agreed),
            noise=max(noise, sys.float_info.epsilon * abs(value)),
            curvature=slope_tolerance,
        )
        iterations += 1
        evaluations += search.evaluations
        found = search.accepted or search.best
        if found.step == 0:
            if conjugate:
                assert memory is not None
                memory = replace(memory, count=0)
            elif search.beyond is None or len(bundle) == MOST_GRADIENTS:
                reason = StopReason.NO_DECREASE
                break
            else:
                bundle.append(search.beyond.gradient)
            continue
        bundle.clear()
        count = memory.count + 1 if memory is not None and conjugate else 1
        due = search.accepted is None or count >= gradient.numel()
        memory = Memory(direction, gradient, slope * found.step, 0 if due else count)
        point = point + found.step * direction
        value, gradient = found.value, found.gradient
    return NonlinearCGResult(point, value, memory, iterations, evaluations, reason)


def conjugacy(formula: Formula, gradient: Tensor, memory: Memory, agreed: Agreed = _own) -> float:
    """β, with y = g - g_prev; 0, which is a restart, where it is not defined.

    Polak and Ribière's with a plus is max(0, gᵀy / ‖g_prev‖²), Hestenes and Stiefel's is
    gᵀy / d_prevᵀy.
    """
    change = gradient - memory.gradient
    numerator = agreed(float(gradient @ change))
    if formula == "polak-ribiere":
        numerator = max(0.0, numerator)
        denominator = agreed(float(memory.gradient @ memory.gradient))
    else:
        denominator = agreed(float(memory.direction @ change))
    # A square may underflow to 0. The Wolfe conditions make the other one positive; after a change
    # of the data they say nothing.
    return numerator / denominator if denominator > 0 else 0.0


def first_step(
    slope: float, gradient: Tensor, memory: Memory | None, agreed: Agreed = _own
) -> float:
    """The first step to try: one that promises as much as the last one; at first, of length 1."""
    step = memory.promised / slope if memory is not None else 0.0
    return step if 0 < step < math.inf else 1 / agreed(float(gradient.norm()))


def _next_direction(
    formula: Formula, gradient: Tensor, steepest: float, memory: Memory | None, agreed: Agreed
) -> tuple[Tensor, float, bool]:
    """d [n], its slope, and whether it is a conjugate direction or a restart.

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


def _along(
    function: Function, point: Tensor, direction: Tensor, agreed: Agreed
) -> Callable[[float], Trial]:
    """The function of one variable that the line search sees."""

    def evaluate(step: float) -> Trial:
        value, gradient = function(point + step * direction)
        return Trial(step, value, agreed(float(gradient @ direction)), gradient)

    return evaluate
