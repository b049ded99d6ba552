"""The estimated minimum of a function of one variable, from two of its points."""

import math
from typing import NamedTuple

# Bounds on the next step while no trial was too far, as multiples of the longest step.
SMALLEST_GROWTH, LARGEST_GROWTH = 1.1, 10.0

# Bounds on an interpolated step, as fractions of the bracket. The lower bound is tiny because the
# first trial may be too far by many orders of magnitude.
NEAREST, FARTHEST = 1e-8, 0.9


class Point(NamedTuple):
    """A trial without its gradient, which may be large and which the bracket does not need."""

    step: float
    value: float
    slope: float


def step_beyond(shorter: Point, low: Point, allowance: float) -> float:
    """The estimated minimum, as a step longer than ``low``."""
    minimum = _minimum(shorter, low, allowance)
    if minimum is None:
        return LARGEST_GROWTH * low.step
    return min(max(minimum, SMALLEST_GROWTH * low.step), LARGEST_GROWTH * low.step)


def step_between(low: Point, high: Point, allowance: float) -> float:
    """The estimated minimum, as a step inside the bracket."""
    minimum = _minimum(low, high, allowance) if math.isfinite(high.value) else None
    if minimum is None:
        return middle(low, high)
    width = high.step - low.step
    return min(max(minimum, low.step + NEAREST * width), low.step + FARTHEST * width)


def middle(low: Point, high: Point) -> float:
    """The geometric middle of the bracket, because the order of magnitude may be unknown."""
    return math.sqrt(low.step) * math.sqrt(high.step) if low.step > 0 else high.step / 10


def _minimum(left: Point, right: Point, allowance: float) -> float | None:
    """The step at which two points suggest a minimum, or None; the left slope is negative."""
    width = right.step - left.step
    secant = (right.value - left.value) / width
    if allowance > 0.1 * width * max(-left.slope, abs(right.slope)):
        # The values are too noisy to help: the zero of the line through the slopes.
        return _zero_of_derivative(left, width, 0.5 * (right.slope - left.slope), 0.0)
    if right.value > left.value:
        # The parabola through both values with the left slope. It ignores the right slope, which
        # far away says little about the left end, and so errs on the side of a short step.
        return _zero_of_derivative(left, width, secant - left.slope, 0.0)
    # The cubic through both values and slopes.
    linear = 3 * secant - 2 * left.slope - right.slope
    square = 3 * (left.slope + right.slope - 2 * secant)
    return _zero_of_derivative(left, width, linear, square)


def _zero_of_derivative(left: Point, width: float, linear: float, square: float) -> float | None:
    """Where left.slope + 2·linear·u + square·u² crosses zero upwards, at u widths from the left.

    Written as −slope / (linear + √(linear² − slope·square)), which has no cancellation, however
    close to the left end the zero lies.
    """
    scale = max(-left.slope, abs(linear), abs(square))
    if not math.isfinite(scale):
        return None
    slope, linear, square = left.slope / scale, linear / scale, square / scale
    discriminant = linear * linear - slope * square
    if discriminant < 0 or linear + math.sqrt(discriminant) <= 0:
        return None
    return left.step - width * slope / (linear + math.sqrt(discriminant))
