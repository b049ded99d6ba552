"""A line search for the strong Wolfe conditions that knows how noisy the values are.

The search sees a function φ of one variable, the step, through trials. Each trial is judged:

    too far      not finite, wild, no sufficient decrease, or climbing steeply
    too short    sufficient decrease, but still descending steeply
    acceptable   sufficient decrease, and a slope small beside the first one (strong Wolfe)

Behind a kink no slope may be small, however close the trials come to it. The weak Wolfe conditions
can be met there, by a trial that decreases sufficiently but climbs steeply. They are all that BFGS
needs (Lewis & Overton 2013).

Steps grow until one is too far. From then on the longest too short and the shortest too far trial
form a bracket, and the next step is interpolated inside it. For a smooth φ the bracket holds an
acceptable step: φ minus the line of sufficient decrease falls at the short end, and at the far end
lies above zero or climbs, so it has a minimum between.

Wild is a slope that the values know nothing of, as where a recurrent net is chaotic: there the
value may be lower by chance, but nothing leads on from it.

A change of the value that is lost in the noise tells nothing, but slopes still do: a value carries
the rounding of a large constant, a slope does not. There the slopes alone judge the trial (the
approximate Wolfe conditions of Hager & Zhang, 2005) and place the next one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, NamedTuple

# Of the Wolfe conditions: the part of the decrease that the first slope promises to insist on, and
# the part of that slope that may remain.
SUFFICIENT_DECREASE, CURVATURE = 1e-4, 0.9

# Two values compared have √2 times the noise of one, so this is about two standard deviations.
NOISE_ALLOWANCE = 3.0

# A slope is wild if it is this many times the first one, and the mean slope of the values so far.
WILD = 1e3

# Bounds on the growth of a step while nothing was too far, as multiples of the longest one.
SMALLEST_GROWTH, LARGEST_GROWTH = 1.1, 10.0

# Bounds on an interpolated step, as parts of the bracket. The lower one is tiny because the first
# trial may be too far by many orders of magnitude.
NEAREST, FARTHEST = 1e-8, 0.9

# A bracket that did not shrink to this part is halved next, whatever interpolation says.
ENOUGH_SHRINKAGE = 2 / 3


@dataclass(frozen=True, slots=True)
class Trial:
    """The function at one step along the direction."""

    step: float
    value: float
    slope: float  # the directional derivative at this step
    gradient: Any  # carried for the caller, never looked at here


class LineSearchOutcome(StrEnum):
    """How a line search ended, as a sentence."""

    STRONG_WOLFE = "the strong Wolfe conditions hold"
    WEAK_WOLFE = "the weak Wolfe conditions hold"
    APPROXIMATE_WOLFE = "the values agree to within their noise and the slopes meet the conditions"
    EVALUATION_LIMIT = "no acceptable step within the allowed evaluations"
    NOTHING_TO_GAIN = "no acceptable step, and what is left to gain is below the noise"


@dataclass(frozen=True, slots=True)
class LineSearchResult:
    """What a line search found and what it cost."""

    accepted: Trial | None  # the trial that meets the conditions
    best: Trial  # the lowest value seen that is not wild, the start included
    beyond: Trial | None  # the shortest that was too far and is not wild
    evaluations: int
    outcome: LineSearchOutcome


class Point(NamedTuple):
    """A trial without its gradient, which may be large: all that the bracket needs."""

    step: float
    value: float
    slope: float


class _Verdict(Enum):
    TOO_SHORT = auto()
    TOO_FAR = auto()
    WEAK_WOLFE = auto()
    STRONG_WOLFE = auto()
    APPROXIMATE_WOLFE = auto()


def wolfe_search(
    evaluate: Callable[[float], Trial],
    start: Trial,
    *,
    first_step: float = 1.0,
    noise: float = 0.0,
    sufficient_decrease: float = SUFFICIENT_DECREASE,
    curvature: float = CURVATURE,
    max_evaluations: int = 20,
    weak: bool = False,
) -> LineSearchResult:
    """Find a step that meets the strong Wolfe conditions.

    With φ the value and φ' the slope, a step t > 0 is accepted when
    φ(t) ≤ φ(0) + sufficient_decrease · t · φ'(0) and |φ'(t)| ≤ curvature · |φ'(0)|;
    the second condition is enough where φ(t) and φ(0) agree to within their noise.

    Args:
        evaluate: the trial at a given step; a value or slope that is not finite means too far.
        start: the trial at step 0; its slope must be negative.
        first_step: the first step tried.
        noise: standard deviation of the absolute error of one value; 0 says they are exact.
        sufficient_decrease: the part of the decrease promised by the first slope to insist on.
        curvature: the part of the first slope that may remain.
        max_evaluations: the most trials to make.
        weak: whether the weak Wolfe conditions are enough.

    Memory: at most four trials are held at a time: ``start``, the best, the shortest that was too
    far and the newest.
    """
    _check_arguments(start, first_step, noise, sufficient_decrease, curvature, max_evaluations)
    allowance = NOISE_ALLOWANCE * noise

    def is_sound(trial: Trial) -> bool:
        if not _is_finite(trial):
            return False
        change = abs(trial.value - start.value) + allowance
        return abs(trial.slope) <= WILD * max(-start.slope, change / trial.step)

    def judge(trial: Trial) -> _Verdict:
        if not is_sound(trial):
            return _Verdict.TOO_FAR
        change = trial.value - start.value
        values_tell = abs(change) >= allowance
        if values_tell and change > sufficient_decrease * trial.step * start.slope:
            return _Verdict.TOO_FAR
        if trial.slope > -curvature * start.slope:
            return _Verdict.WEAK_WOLFE if weak and values_tell else _Verdict.TOO_FAR
        if trial.slope < curvature * start.slope:
            return _Verdict.TOO_SHORT
        return _Verdict.STRONG_WOLFE if values_tell else _Verdict.APPROXIMATE_WOLFE

    best, beyond = start, None
    shorter = low = _point(start)  # the longest that was too short, and the one before it
    high: Point | None = None  # the shortest too far; NaN if nothing can be interpolated with it
    step, width = first_step, math.inf
    for evaluations in range(1, max_evaluations + 1):
        trial = evaluate(step)
        if is_sound(trial) and trial.value < best.value:
            best = trial

        match judge(trial):
            case _Verdict.WEAK_WOLFE:
                outcome = LineSearchOutcome.WEAK_WOLFE
                return LineSearchResult(trial, best, beyond, evaluations, outcome)
            case _Verdict.STRONG_WOLFE:
                outcome = LineSearchOutcome.STRONG_WOLFE
                return LineSearchResult(trial, best, beyond, evaluations, outcome)
            case _Verdict.APPROXIMATE_WOLFE:
                outcome = LineSearchOutcome.APPROXIMATE_WOLFE
                return LineSearchResult(trial, best, beyond, evaluations, outcome)
            case _Verdict.TOO_SHORT:
                shorter, low = low, _point(trial)
            case _Verdict.TOO_FAR:
                # Nothing can be interpolated with what is wild.
                high = Point(step, math.nan, math.nan)
                if is_sound(trial):
                    high, beyond = _point(trial), trial
        del trial  # frees its gradient before the next one is made, unless it is the best

        if high is None:
            step = _step_beyond(shorter, low, allowance)
            continue
        previous_width, width = width, high.step - low.step
        if width <= ENOUGH_SHRINKAGE * previous_width:
            step = _step_between(low, high, allowance)
        else:
            step = _middle(low, high)
        if -low.slope * width <= noise or not low.step < step < high.step:
            outcome = LineSearchOutcome.NOTHING_TO_GAIN
            return LineSearchResult(None, best, beyond, evaluations, outcome)
    outcome = LineSearchOutcome.EVALUATION_LIMIT
    return LineSearchResult(None, best, beyond, max_evaluations, outcome)


def _step_beyond(shorter: Point, low: Point, allowance: float) -> float:
    """A longer step than ``low``, where the function seems to have its minimum."""
    minimum = _minimum(shorter, low, allowance)
    if minimum is None:
        return LARGEST_GROWTH * low.step
    return min(max(minimum, SMALLEST_GROWTH * low.step), LARGEST_GROWTH * low.step)


def _step_between(low: Point, high: Point, allowance: float) -> float:
    """A step inside the bracket, where the function seems to have its minimum."""
    minimum = _minimum(low, high, allowance) if _is_finite(high) else None
    if minimum is None:
        return _middle(low, high)
    width = high.step - low.step
    return min(max(minimum, low.step + NEAREST * width), low.step + FARTHEST * width)


def _middle(low: Point, high: Point) -> float:
    """The middle of the bracket in order of magnitude, for a scale may be what is sought."""
    return math.sqrt(low.step) * math.sqrt(high.step) if low.step > 0 else high.step / 10


def _minimum(left: Point, right: Point, allowance: float) -> float | None:
    """The step of the minimum that two points suggest, or None; the left slope is negative."""
    width = right.step - left.step
    secant = (right.value - left.value) / width
    if allowance > 0.1 * width * max(-left.slope, abs(right.slope)):
        # The values are too noisy to help: the zero of the line through the slopes.
        return _zero_of_derivative(left, width, 0.5 * (right.slope - left.slope), 0.0)
    if right.value > left.value:
        # The parabola through both values. It leaves out the right slope, which far away says
        # little about the left end, and so errs on the side of a short step.
        return _zero_of_derivative(left, width, secant - left.slope, 0.0)
    # The cubic through both values and slopes.
    linear = 3 * secant - 2 * left.slope - right.slope
    square = 3 * (left.slope + right.slope - 2 * secant)
    return _zero_of_derivative(left, width, linear, square)


def _zero_of_derivative(left: Point, width: float, linear: float, square: float) -> float | None:
    """Where left.slope + 2·linear·u + square·u² crosses zero upwards, at u widths from the left.

    Written as −slope / (linear + √(linear² − slope·square)), which does not cancel however close
    to the left end the zero lies.
    """
    scale = max(-left.slope, abs(linear), abs(square))
    if not math.isfinite(scale):
        return None
    slope, linear, square = left.slope / scale, linear / scale, square / scale
    discriminant = linear * linear - slope * square
    if discriminant < 0 or linear + math.sqrt(discriminant) <= 0:
        return None
    return left.step - width * slope / (linear + math.sqrt(discriminant))


def _point(trial: Trial) -> Point:
    return Point(trial.step, trial.value, trial.slope)


def _is_finite(trial: Trial | Point) -> bool:
    return math.isfinite(trial.value) and math.isfinite(trial.slope)


def _check_arguments(
    start: Trial,
    first_step: float,
    noise: float,
    sufficient_decrease: float,
    curvature: float,
    max_evaluations: int,
) -> None:
    if start.step != 0 or not _is_finite(start):
        raise ValueError(f"start must be the trial at step 0 and finite, got {_point(start)}")
    if start.slope >= 0:
        raise ValueError(
            f"start.slope must be negative, got {start.slope}: "
            "the function does not fall along this direction; search along another one"
        )
    if not 0 < first_step < math.inf:
        raise ValueError(f"first_step must be positive and finite, got {first_step}")
    if not 0 <= noise < math.inf:
        raise ValueError(f"noise must be finite and at least 0, got {noise}")
    if not 0 < sufficient_decrease < curvature < 1:
        raise ValueError(
            "sufficient_decrease and curvature must be ordered as "
            f"0 < sufficient_decrease < curvature < 1, got {sufficient_decrease} and {curvature}"
        )
    if max_evaluations < 1:
        raise ValueError(f"max_evaluations must be at least 1, got {max_evaluations}")
