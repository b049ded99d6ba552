"""BFGS on functions that are smooth nearly everywhere, and have their minima where they are not."""

import numpy as np
import pytest

from krylov_descent.algorithms.bfgs import StopReason, Vector
from krylov_descent.algorithms.line_search import LineSearchOutcome, Trial
from tests.functions import ArrayFunction, minimize_arrays, wolfe_search


def absolutes(x: Vector) -> tuple[float, Vector]:
    """Σ wᵢ|xᵢ − 1|, with weights of 1 to 100."""
    weights = np.geomspace(1, 100, len(x))
    return float(weights @ np.abs(x - 1)), weights * np.where(x >= 1, 1.0, -1.0)


def valley(x: Vector) -> tuple[float, Vector]:
    """Rosenbrock's with a kink along its floor, |x₁ − x₀²| + (1 − x₀)²; the minimum is 0."""
    across = x[1] - x[0] ** 2
    side = 1.0 if across >= 0 else -1.0
    gradient = np.array([-2 * x[0] * side - 2 * (1 - x[0]), side])
    return float(abs(across) + (1 - x[0]) ** 2), gradient


def largest_of_planes(seed: int) -> ArrayFunction:
    """max(Aᵢx + bᵢ) + ½‖x‖² over eight planes in five variables."""
    generator = np.random.default_rng(seed)
    planes, offsets = generator.standard_normal((8, 5)), generator.standard_normal(8)

    def at(x: Vector) -> tuple[float, Vector]:
        values = planes @ x + offsets
        top = int(values.argmax())
        return float(values[top] + x @ x / 2), planes[top] + x

    return at


def lowest(function: ArrayFunction, size: int) -> float:
    """The minimum of a convex function by many steps of the subgradient method."""
    x, best = np.zeros(size), np.inf
    for k in range(60_000):
        value, gradient = function(x)
        best = min(best, value)
        x = x - gradient / (k + 2)  # right for curvature of 1
    return float(best)


@pytest.mark.parametrize("size", [1, 2, 7, 20])
def test_absolute_values_are_minimised(size: int) -> None:
    found = minimize_arrays(absolutes, np.zeros(size) + 0.1 * np.arange(size), max_iterations=200)
    assert found.value < 1e-6 * size


def test_the_floor_of_a_valley_with_a_kink_is_followed() -> None:
    found = minimize_arrays(valley, np.array([-1.0, 1.0]), max_iterations=200)
    assert found.value < 1e-6  # it begins on the kink, at 4


@pytest.mark.parametrize("seed", range(5))
def test_the_largest_of_planes_is_minimised(seed: int) -> None:
    function = largest_of_planes(seed)
    found = minimize_arrays(function, np.zeros(5), max_iterations=200)
    assert found.value <= lowest(function, 5) + 1e-4


def test_a_search_that_begins_at_a_kink_goes_on() -> None:
    """Along −g the function climbs at once, whichever side the gradient is of."""

    def at(x: Vector) -> tuple[float, Vector]:
        side = 1.0 if x[0] > 0 else -1.0
        return float(3 * abs(x[0]) + 0.1 * x[1] + x[1] ** 2), np.array([3 * side, 0.1 + 2 * x[1]])

    start = np.array([0.0, 1.0])
    value, _ = at(start)
    found = minimize_arrays(at, start, max_iterations=30)
    assert found.value < 0.1 < value


def test_the_minimum_of_a_kink_is_known_as_such() -> None:
    """From it every direction climbs. The gradients around it have zero in their hull."""
    found = minimize_arrays(absolutes, np.ones(2), noise=1e-12)
    assert found.value == 0.0
    assert found.reason in (StopReason.BELOW_NOISE, StopReason.NO_DECREASE)
    assert found.evaluations < 300


def test_weak_conditions_hold_behind_a_kink_where_strong_ones_cannot() -> None:
    def trial(step: float) -> Trial:
        return Trial(step, abs(step - 1), 1.0 if step > 1 else -1.0, None)

    start = Trial(0.0, 1.0, -1.0, None)
    strong = wolfe_search(trial, start, first_step=0.7)
    assert strong.accepted is None
    weak = wolfe_search(trial, start, first_step=0.7, weak=True)
    assert weak.outcome is LineSearchOutcome.WEAK_WOLFE
    assert weak.accepted is not None
    assert 1 < weak.accepted.step < 2


def test_the_shortest_trial_too_far_is_told() -> None:
    """Its gradient is that of the other side of the kink."""

    def trial(step: float) -> Trial:
        return Trial(step, abs(step - 1e-3) + 3 * step, 4.0 if step > 1e-3 else 2.0, step)

    tried: list[float] = []

    def noted(step: float) -> Trial:
        tried.append(step)
        return trial(step)

    found = wolfe_search(noted, Trial(0.0, 1e-3, -1.0, 0.0), weak=True)
    assert found.accepted is None
    assert found.beyond is not None
    assert found.beyond.step == min(tried)
