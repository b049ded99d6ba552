"""The line search: its conditions, its behaviour in noise and at infinity, its memory."""

import math
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from krylov_descent.algorithms.line_search import LineSearchOutcome, Trial, WolfeSearch
from tests.functions import wolfe_search

Curve = Callable[[float], tuple[float, float]]  # from a step to value and slope


class Recorder:
    """A curve as the line search wants it, remembering every trial."""

    def __init__(self, curve: Curve) -> None:
        self.curve = curve
        self.trials: list[Trial] = []

    def __call__(self, step: float) -> Trial:
        value, slope = self.curve(step)
        self.trials.append(Trial(step, value, slope, torch.tensor([slope])))
        return self.trials[-1]

    def start(self) -> Trial:
        value, slope = self.curve(0.0)
        return Trial(0.0, value, slope, torch.tensor([slope]))


def parabola(minimum: float, curvature: float = 1.0) -> Curve:
    return lambda t: (0.5 * curvature * (t - minimum) ** 2, curvature * (t - minimum))


def assert_strong_wolfe(start: Trial, trial: Trial, decrease: float, curvature: float) -> None:
    assert trial.step > 0
    slack = 4 * np.finfo(float).eps * max(abs(start.value), abs(trial.value))
    assert trial.value <= start.value + decrease * trial.step * start.slope + slack
    assert abs(trial.slope) <= curvature * abs(start.slope)


waves = st.tuples(st.floats(-3, 3), st.floats(0.1, 5), st.floats(0, 6.3))


@settings(max_examples=300, deadline=None)
@given(
    waves=st.lists(waves, min_size=1, max_size=5),
    tilt=st.floats(-10, 10),
    stiffness=st.floats(1e-3, 100),
    first_step=st.floats(1e-6, 1e6),
    conditions=st.sampled_from([(1e-4, 0.1), (1e-4, 0.9), (0.2, 0.5), (0.45, 0.5), (0.4, 0.9)]),
)
def test_accepted_steps_meet_the_strong_wolfe_conditions(
    waves: list[tuple[float, float, float]],
    tilt: float,
    stiffness: float,
    first_step: float,
    conditions: tuple[float, float],
) -> None:
    decrease, curvature = conditions

    def curve(t: float) -> tuple[float, float]:
        value = 0.5 * stiffness * t**2 + tilt * t
        slope = stiffness * t + tilt
        for height, frequency, phase in waves:
            value += height * math.cos(frequency * t + phase)
            slope -= height * frequency * math.sin(frequency * t + phase)
        return value, slope

    if abs(curve(0.0)[1]) < 1e-2:  # a stationary start has no direction of descent
        return
    sign = -math.copysign(1.0, curve(0.0)[1])
    recorder = Recorder(lambda t: (curve(sign * t)[0], sign * curve(sign * t)[1]))
    start = recorder.start()

    result = wolfe_search(
        recorder,
        start,
        first_step=first_step,
        sufficient_decrease=decrease,
        curvature=curvature,
        max_evaluations=100,
    )

    assert result.accepted is not None
    assert result.accepted is recorder.trials[-1]
    assert result.outcome is LineSearchOutcome.STRONG_WOLFE
    assert_strong_wolfe(start, result.accepted, decrease, curvature)
    assert result.evaluations == len(recorder.trials)
    assert result.best.value == min(t.value for t in [start, *recorder.trials])


@pytest.mark.parametrize("minimum", [1e-6, 1e-3, 0.3, 1.0, 5.0, 1e3, 1e6])
def test_a_badly_scaled_parabola_costs_little_more_than_its_orders_of_magnitude(
    minimum: float,
) -> None:
    recorder = Recorder(parabola(minimum))
    result = wolfe_search(recorder, recorder.start())
    assert result.accepted is not None
    # Too far by any factor: the parabola is seen through at once. Too short: tenfold growth.
    assert result.evaluations <= (2 if minimum < 1 else 2 + math.log10(minimum))


@pytest.mark.parametrize("power", [2, 3, 4, 6])
@pytest.mark.parametrize("height", [1e2, 1e4, 1e6, 1e9, 1e12])
def test_a_wall_far_from_a_parabola_does_not_hold_up_the_search(power: int, height: float) -> None:
    """The first trial is so high that it tells little about the start."""
    recorder = Recorder(lambda t: (height * t**power - t, power * height * t ** (power - 1) - 1))
    result = wolfe_search(recorder, recorder.start())
    assert result.accepted is not None
    assert result.evaluations <= 8


def test_a_natural_first_step_is_accepted_at_once() -> None:
    recorder = Recorder(parabola(1.0))
    result = wolfe_search(recorder, recorder.start())
    assert result.evaluations == 1
    assert result.accepted is result.best is recorder.trials[0]


def test_outside_a_barrier_is_too_far() -> None:
    def barrier(t: float) -> tuple[float, float]:
        if t >= 1e-3:
            return math.nan, math.nan
        return -math.log1p(-1e3 * t) - 5e3 * t, 1e3 / (1 - 1e3 * t) - 5e3

    recorder = Recorder(barrier)
    start = recorder.start()
    result = wolfe_search(recorder, start)
    assert result.accepted is not None
    assert_strong_wolfe(start, result.accepted, 1e-4, 0.9)
    assert result.evaluations <= 8


def test_overflow_is_too_far() -> None:
    def curve(t: float) -> tuple[float, float]:
        return (math.exp(t) - 9 * t, math.exp(t) - 9) if t < 700 else (math.inf, math.inf)

    recorder = Recorder(curve)
    start = recorder.start()
    result = wolfe_search(recorder, start, first_step=1e5)
    assert result.accepted is not None
    assert_strong_wolfe(start, result.accepted, 1e-4, 0.9)


def test_a_finite_value_without_a_finite_slope_is_too_far_and_never_the_best() -> None:
    def curve(t: float) -> tuple[float, float]:
        return (-100.0, math.nan) if t > 0.5 else parabola(0.3)(t)

    recorder = Recorder(curve)
    result = wolfe_search(recorder, recorder.start())
    assert result.accepted is not None
    assert result.best is result.accepted


def test_where_it_is_wild_is_too_far_and_never_the_best() -> None:
    """A parabola, and beyond ½ a lower value with slopes that say nothing about it."""

    def curve(t: float) -> tuple[float, float]:
        if t > 0.5:
            return -1.0, -1e8 * math.cos(1e8 * t)
        return parabola(0.3)(t)

    recorder = Recorder(curve)
    result = wolfe_search(recorder, recorder.start())
    assert result.accepted is not None
    assert result.accepted.step < 0.5
    assert result.best.value >= 0
    assert result.evaluations <= 4


def test_a_fall_that_grows_steeper_with_its_values_is_not_wild() -> None:
    """As where a plateau ends: 10,000 times the first slope, over a fall of the same order."""
    recorder = Recorder(lambda t: (-(math.exp(9.3 * t) - 1) / 9.3, -math.exp(9.3 * t)))
    result = wolfe_search(recorder, recorder.start(), max_evaluations=1)
    assert result.best.step == 1.0


def test_an_unbounded_fall_ends_at_the_limit_with_the_lowest_trial() -> None:
    recorder = Recorder(lambda t: (-t, -1.0))
    result = wolfe_search(recorder, recorder.start(), max_evaluations=7)
    assert result.accepted is None
    assert result.outcome is LineSearchOutcome.EVALUATION_LIMIT
    assert result.evaluations == len(recorder.trials) == 7
    assert result.best is recorder.trials[-1]


def test_a_kink_ends_without_an_acceptable_step_but_with_the_decrease_it_found() -> None:
    recorder = Recorder(lambda t: (abs(t - math.pi), math.copysign(1.0, t - math.pi)))
    result = wolfe_search(recorder, recorder.start(), curvature=0.5, max_evaluations=200)
    assert result.accepted is None
    assert result.outcome is LineSearchOutcome.NOTHING_TO_GAIN
    assert result.best.value < 1e-8
    assert result.evaluations < 200


@pytest.mark.parametrize("minimum", [0.1, 0.3, 0.6, 1.0, 2.0, 30.0])
def test_slopes_decide_where_the_values_are_noise(minimum: float) -> None:
    """All that there is to gain is one standard deviation of the noise."""
    noise = 1e-6
    clean = parabola(minimum, curvature=2 * noise / minimum**2)
    generator = np.random.default_rng(0)

    def curve(t: float) -> tuple[float, float]:
        return 56 + clean(t)[0] + noise * generator.normal(), clean(t)[1]

    accepted, approximate, evaluations = 0, 0, 0
    for _ in range(200):
        recorder = Recorder(curve)
        start = recorder.start()
        result = wolfe_search(recorder, start, noise=noise)
        evaluations += result.evaluations
        if result.accepted is not None:
            accepted += 1
            approximate += result.outcome is LineSearchOutcome.APPROXIMATE_WOLFE
            assert abs(result.accepted.slope) <= 0.9 * abs(start.slope)
    # The allowance of 3 is 2.1 standard deviations of a change: at most 1.7 % of trials lie above.
    assert accepted >= 190
    assert approximate >= 150
    # At once if the minimum is near 1, else by one interpolation along the slopes (or, tenfold
    # at a time, two expansions).
    assert evaluations <= 200 * (1.05 if 0.6 <= minimum <= 2 else 2.05 if minimum < 1 else 3.05)


def test_values_that_contradict_the_slopes_are_given_up_once_nothing_is_left_to_gain() -> None:
    """A start that was luckily low: every trial lies above it by more than the allowance."""
    recorder = Recorder(lambda t: (1e-3 * (t > 0) + 1e-4 * (t - 1) ** 2, 2e-4 * (t - 1)))
    result = wolfe_search(recorder, recorder.start(), noise=1e-4)
    assert result.accepted is None
    assert result.outcome is LineSearchOutcome.NOTHING_TO_GAIN
    assert result.evaluations <= 3
    assert result.best.step == 0


def test_a_decrease_beyond_the_noise_is_judged_by_the_values() -> None:
    recorder = Recorder(parabola(1.0))
    result = wolfe_search(recorder, recorder.start(), noise=1e-3)
    assert result.outcome is LineSearchOutcome.STRONG_WOLFE


def test_at_most_three_gradients_are_alive() -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def evaluate(step: float) -> Trial:
        nonlocal most
        # A stiff, wavy curve, with little patience for what remains of the slope.
        value = 0.5 * (step - 3) ** 2 + math.cos(9 * step)
        slope = step - 3 - 9 * math.sin(9 * step)
        gradient = torch.tensor([slope])
        alive.append(weakref.ref(gradient))
        most = max(most, sum(reference() is not None for reference in alive))
        return Trial(step, value, slope, gradient)

    result = wolfe_search(evaluate, evaluate(0.0), curvature=1e-3, first_step=1e-3)
    assert result.evaluations >= 6
    assert most <= 3


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_a_direction_that_does_not_descend_is_refused(slope: float) -> None:
    with pytest.raises(ValueError, match=r"start\.slope must be negative"):
        wolfe_search(Recorder(parabola(1.0)), Trial(0.0, 1.0, slope, torch.zeros(1)))


@pytest.mark.parametrize(
    ("step", "value", "slope"), [(1.0, 1.0, -1.0), (0.0, math.nan, -1.0), (0.0, 1.0, -math.inf)]
)
def test_a_start_that_is_none_is_refused(step: float, value: float, slope: float) -> None:
    with pytest.raises(ValueError, match="start must be"):
        wolfe_search(Recorder(parabola(1.0)), Trial(step, value, slope, torch.zeros(1)))


@pytest.mark.parametrize(
    "arguments",
    [
        {"first_step": 0.0},
        {"first_step": math.inf},
        {"noise": -1.0},
        {"noise": math.nan},
        {"curvature": 1.0},
        {"sufficient_decrease": 0.95},
        {"max_evaluations": 0},
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, float]) -> None:
    recorder = Recorder(parabola(1.0))
    with pytest.raises(ValueError, match=next(iter(arguments))):
        wolfe_search(recorder, recorder.start(), **arguments)


def test_a_search_asks_and_is_told() -> None:
    """A parabola with its minimum at 0.3: the step of 1 is too far, the next is the minimum."""
    recorder = Recorder(parabola(0.3))
    search = WolfeSearch(recorder.start())
    asked: list[float] = []
    while search.result is None:
        asked.append(search.step)
        assert search.step == asked[-1]  # asking changes nothing
        assert search.evaluations == len(asked) - 1
        search.tell(recorder(search.step))
    assert asked == pytest.approx([1.0, 0.3])
    assert search.result.accepted is recorder.trials[-1]
    assert search.result.evaluations == 2
    assert search.high == (1.0, *parabola(0.3)(1.0))
    assert search.result == wolfe_search(recorder, recorder.start())


def test_a_search_that_has_ended_is_told_nothing_more() -> None:
    recorder = Recorder(parabola(1.0))
    search = WolfeSearch(recorder.start())
    search.tell(recorder(search.step))
    result = search.result
    with pytest.raises(RuntimeError, match=r"has ended \(the strong Wolfe conditions hold\)"):
        search.tell(recorder(search.step))
    assert search.result is result
