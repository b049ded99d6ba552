"""A search ends when its last evaluations bring less than half of the step's average."""

import numpy as np
import pytest

from krylov_descent.algorithms.bfgs import BFGS, StopReason
from krylov_descent.algorithms.diminishing_returns import DiminishingReturns
from krylov_descent.algorithms.minimizer import minimize


def iterations_until_the_end(values: list[float], spent: float) -> int | None:
    """For a search of one evaluation an iteration; None if it goes on to the last value."""
    returns = DiminishingReturns(values[0], spent)
    for evaluations, value in enumerate(values[1:], start=1):
        if returns.have_come(evaluations, value):
            return evaluations
    return None


def test_a_steady_decrease_goes_on_however_much_was_spent() -> None:
    values = [-float(k) for k in range(100)]
    for spent in (0.0, 10.0, 1e6):
        assert iterations_until_the_end(values, spent) is None


def test_the_more_was_spent_the_longer_a_search_goes_on() -> None:
    """With f = 0.8ᵏ the last three of k bring half of the average at the k of the closed form."""
    values = [0.8**k for k in range(200)]
    ends = []
    for spent in (1.0, 10.0, 100.0):
        expected = next(
            k
            for k in range(3, 200)
            if (last := max(3, k // 4))
            and (values[k - last] - values[k]) / last < 0.5 * (1 - values[k]) / (spent + k)
        )
        found = iterations_until_the_end(values, spent)
        assert found == expected
        ends.append(found)
    assert ends == sorted(set(ends))


def test_one_idle_iteration_is_forgiven_and_three_are_not() -> None:
    steady = [-float(k) for k in range(8)]
    assert iterations_until_the_end([*steady, -7.0, -8.0, -9.0], 5.0) is None
    assert iterations_until_the_end([*steady, -7.0, -7.0, -7.0], 5.0) == 10


def test_a_search_without_any_decrease_may_cost_as_much_as_the_rest_of_the_step() -> None:
    assert iterations_until_the_end([1.0] * 500, 5.0) == 101
    assert iterations_until_the_end([1.0] * 500, 300.0) == 301
    assert iterations_until_the_end([1.0] * 90 + [0.0], 5.0) is None


def test_a_search_in_vain_says_that_nothing_was_found() -> None:
    """Gradients promise a decrease, and the value, which is rounded, never changes."""

    def rounded(point: np.ndarray) -> tuple[float, np.ndarray]:
        return 1.0, -1 / (1 + np.abs(point))

    returns = DiminishingReturns(1.0, 5.0)
    search = BFGS(np.zeros(4), *rounded(np.zeros(4)), max_iterations=1000, returns=returns)
    found = minimize(search, rounded)
    assert found.reason is StopReason.NO_DECREASE
    assert 100 < found.evaluations < 130


@pytest.mark.parametrize("spent", [2.0, 1000.0])
def test_bfgs_ends_with_its_best_point(spent: float) -> None:
    scales = np.logspace(0, 4, 30)

    def bent(point: np.ndarray) -> tuple[float, np.ndarray]:
        return float(scales @ (np.sqrt(1 + point**2) - 1)), scales * point / np.sqrt(1 + point**2)

    start = np.full(30, 3.0)
    found, whole = (
        minimize(BFGS(start, *bent(start), max_iterations=500, returns=returns), bent)
        for returns in (DiminishingReturns(bent(start)[0], spent), None)
    )
    assert found.reason is StopReason.LITTLE_GAIN
    assert found.evaluations < whole.evaluations
    assert whole.value < found.value < bent(start)[0]
    assert bent(found.point)[0] == found.value
