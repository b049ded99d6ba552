"""A line search for the strong Wolfe conditions that takes the noise of the values into account.

The search asks for trials of a function φ of one variable, the step. It judges each trial:

    too far      not finite, wild, no sufficient decrease, or climbing steeply
    too short    sufficient decrease, but still descending steeply
    acceptable   sufficient decrease, and a slope small beside the first one (strong Wolfe)

At a kink there may be no small slope, however close the trials come to it. A trial behind the kink
that decreases sufficiently but climbs steeply meets the weak Wolfe conditions. They are all that
BFGS needs (Lewis & Overton 2013).

Steps grow until one is too far. From then on the longest trial that was too short and the shortest
trial that was too far form a bracket, and the next step is interpolated inside it. For a smooth φ
the bracket holds an acceptable step: φ minus the line of sufficient decrease falls at the short
end. At the far end it lies above zero or climbs. So it has a minimum between the ends.

A slope is wild if the values give no sign of it, as where a recurrent net is chaotic. There the
value may be lower by chance, but the search cannot continue from such a trial.

A change of the value below the noise has no meaning, but slopes still do: a value carries the
rounding of a large constant, a slope does not. In this case the slopes alone judge the trial (the
approximate Wolfe conditions of Hager & Zhang, 2005) and place the next one.
"""

import math
from enum import Enum, StrEnum, auto
from typing import Any, NamedTuple

from krylov_descent.algorithms.interpolation import Point, middle, step_between, step_beyond

# The Wolfe conditions: the required fraction of the decrease that the first slope promises, and the
# fraction of that slope that may remain.
SUFFICIENT_DECREASE, CURVATURE = 1e-4, 0.9

# The difference of two values has √2 times the noise of one, so this is about two standard
# deviations.
NOISE_ALLOWANCE = 3.0

# A slope is wild if it exceeds this many times the first slope, and this many times the mean slope
# of the values from the start to the trial.
WILD = 1e3

# If the bracket did not shrink to this fraction, the next step is its middle.
ENOUGH_SHRINKAGE = 2 / 3


class Trial(NamedTuple):
    """The function at one step along the direction."""

    step: float
    value: float
    slope: float  # the directional derivative at this step
    gradient: Any  # passed on to the caller, not used here


class LineSearchOutcome(StrEnum):
    """How a line search ended, as a sentence."""

    STRONG_WOLFE = "the strong Wolfe conditions hold"
    WEAK_WOLFE = "the weak Wolfe conditions hold"
    APPROXIMATE_WOLFE = "the values agree to within their noise and the slopes meet the conditions"
    EVALUATION_LIMIT = "no acceptable step within the allowed evaluations"
    NOTHING_TO_GAIN = "no acceptable step, and what is left to gain is below the noise"


class LineSearchResult(NamedTuple):
    """What a line search found and what it cost."""

    accepted: Trial | None  # the trial that meets the conditions, if any
    best: Trial  # the trial with the lowest value that is not wild; may be the start
    beyond: Trial | None  # the shortest trial that was too far and is not wild
    evaluations: int
    outcome: LineSearchOutcome


class _Miss(Enum):
    TOO_SHORT = auto()
    TOO_FAR = auto()


class WolfeSearch:
    """The search for a step that meets the strong Wolfe conditions.

    With φ the value and φ' the slope, a step t > 0 is accepted if
    φ(t) ≤ φ(0) + sufficient_decrease · t · φ'(0) and |φ'(t)| ≤ curvature · |φ'(0)|.
    The second condition is enough if φ(t) and φ(0) agree to within their noise.

    The search asks for a trial at `step` and continues when `tell` is called with it:

        while search.result is None:
            search.tell(trial_at(search.step))

    Args:
        start: the trial at step 0; its slope must be negative.
        first_step: the first step to try.
        noise: standard deviation of the absolute error of one value; 0 means that values are exact.
        sufficient_decrease: the required fraction of the decrease that the first slope promises.
        curvature: the fraction of the first slope that may remain.
        max_evaluations: the most trials to ask for.
        weak: whether the weak Wolfe conditions are enough.

    Attributes:
        step: the step to try; meaningless after the end.
        result: what was found; None until the end.

    Memory: at most three trials: ``start``, the best, and the shortest that was too far.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        start: Trial,
        *,
        first_step: float = 1.0,
        noise: float = 0.0,
        sufficient_decrease: float = SUFFICIENT_DECREASE,
        curvature: float = CURVATURE,
        max_evaluations: int = 20,
        weak: bool = False,
    ) -> None:
        self.start, self.noise, self.allowance = start, noise, NOISE_ALLOWANCE * noise
        self.sufficient_decrease, self.curvature, self.weak = sufficient_decrease, curvature, weak
        self.max_evaluations, self.evaluations = max_evaluations, 0
        self.step = first_step
        _check_arguments(self)
        self.result: LineSearchResult | None = None
        self.best = start
        self.beyond: Trial | None = None
        # The longest trial that was too short, and the one before it.
        self.low = self.shorter = _point(start)
        # The shortest trial that was too far; with NaN if it cannot be used for interpolation.
        self.high: Point | None = None
        self.width = math.inf  # of the bracket between low and high

    def tell(self, trial: Trial) -> None:
        """Take the trial at `step`, and continue to the next step or the result.

        Args:
            trial: too far if its value or slope is not finite.

        Raises:
            RuntimeError: there is a result already.
        """
        if self.result is not None:
            raise RuntimeError(
                f"the line search has ended ({self.result.outcome}): read `result`, "
                "and begin another one to go on"
            )
        self.evaluations += 1
        if not self._is_sound(trial):
            self.high = Point(trial.step, math.nan, math.nan)
        else:
            if trial.value < self.best.value:
                self.best = trial
            verdict = self._judge(trial)
            if isinstance(verdict, LineSearchOutcome):
                self._finish(verdict, accepted=trial)
                return
            if verdict is _Miss.TOO_SHORT:
                self.shorter, self.low = self.low, _point(trial)
            else:
                self.high, self.beyond = _point(trial), trial
        self._place_next()

    def _is_sound(self, trial: Trial) -> bool:
        """Whether the trial is finite and not wild."""
        if not _is_finite(trial):
            return False
        change = abs(trial.value - self.start.value) + self.allowance
        return abs(trial.slope) <= WILD * max(-self.start.slope, change / trial.step)

    def _judge(self, trial: Trial) -> LineSearchOutcome | _Miss:
        """The conditions that a sound trial meets, or how it misses them."""
        change, first_slope = trial.value - self.start.value, self.start.slope
        values_tell = abs(change) >= self.allowance
        if values_tell and change > self.sufficient_decrease * trial.step * first_slope:
            return _Miss.TOO_FAR
        if trial.slope > -self.curvature * first_slope:
            return LineSearchOutcome.WEAK_WOLFE if self.weak and values_tell else _Miss.TOO_FAR
        if trial.slope < self.curvature * first_slope:
            return _Miss.TOO_SHORT
        if values_tell:
            return LineSearchOutcome.STRONG_WOLFE
        return LineSearchOutcome.APPROXIMATE_WOLFE

    def _place_next(self) -> None:
        """Ask for a step beyond ``low`` or inside the bracket, or give up."""
        low, high = self.low, self.high
        if high is None:
            self.step = step_beyond(self.shorter, low, self.allowance)
        else:
            previous_width, self.width = self.width, high.step - low.step
            if self.width <= ENOUGH_SHRINKAGE * previous_width:
                self.step = step_between(low, high, self.allowance)
            else:
                self.step = middle(low, high)
            if -low.slope * self.width <= self.noise or not low.step < self.step < high.step:
                self._finish(LineSearchOutcome.NOTHING_TO_GAIN)
                return
        if self.evaluations == self.max_evaluations:
            self._finish(LineSearchOutcome.EVALUATION_LIMIT)

    def _finish(self, outcome: LineSearchOutcome, accepted: Trial | None = None) -> None:
        self.result = LineSearchResult(accepted, self.best, self.beyond, self.evaluations, outcome)


def _point(trial: Trial) -> Point:
    return Point(trial.step, trial.value, trial.slope)


def _is_finite(trial: Trial | Point) -> bool:
    return math.isfinite(trial.value) and math.isfinite(trial.slope)


def _check_arguments(search: WolfeSearch) -> None:
    start, curvature, decrease = search.start, search.curvature, search.sufficient_decrease
    if start.step != 0 or not _is_finite(start):
        raise ValueError(f"start must be the trial at step 0 and finite, got {_point(start)}")
    if start.slope >= 0:
        raise ValueError(
            f"start.slope must be negative, got {start.slope}: "
            "the function does not fall along this direction; search along another one"
        )
    if not 0 < search.step < math.inf:
        raise ValueError(f"first_step must be positive and finite, got {search.step}")
    if not 0 <= search.noise < math.inf:
        raise ValueError(f"noise must be finite and at least 0, got {search.noise}")
    if not 0 < decrease < curvature < 1:
        raise ValueError(
            "sufficient_decrease and curvature must be ordered as "
            f"0 < sufficient_decrease < curvature < 1, got {decrease} and {curvature}"
        )
    if search.max_evaluations < 1:
        raise ValueError(f"max_evaluations must be at least 1, got {search.max_evaluations}")
