"""Dense BFGS: against SciPy's, at infinity, and in the degenerate cases."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from krylov_descent.algorithms.bfgs import BFGS, StopReason, Vector
from tests.functions import (
    Function,
    Problem,
    differentiable,
    minimize,
    normal,
    quadratic,
    scipy_bfgs,
    spread,
)

EPSILON = float(np.finfo(np.float64).eps)


class Recorder:
    """A function that remembers all values it returned."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.values: list[float] = []

    def __call__(self, point: Tensor) -> tuple[float, Tensor]:
        value, gradient = self.function(point)
        self.values.append(value)
        return value, gradient

    def evaluations_to(self, target: float) -> int:
        return 1 + next(i for i, value in enumerate(self.values) if value <= target)


# --- against SciPy on smooth functions -----------------------------------------------------------


def rosenbrocks() -> Iterator[Problem]:
    def valley(x: Tensor) -> tuple[float, Tensor]:
        across, along = x[1:] - x[:-1] ** 2, 1 - x[:-1]
        gradient = torch.zeros_like(x)
        gradient[1:] = 200 * across
        gradient[:-1] -= 400 * x[:-1] * across + 2 * along
        return float(100 * across @ across + along @ along), gradient

    for size in (2, 5, 10, 20):
        for seed in range(3):
            yield valley, 0.1 * normal(size, seed=seed)


def logistic_regressions() -> Iterator[Problem]:
    for seed in range(4):
        inputs, weights = normal(200, 10, seed=seed), normal(10, seed=seed + 10)
        labels = (inputs @ weights + normal(200, seed=seed + 20)).sign()

        def loss(w: Tensor, x: Tensor = inputs, y: Tensor = labels) -> Tensor:
            return nn.functional.softplus(-y * (x @ w)).mean() + 1e-3 * (w @ w)

        yield differentiable(loss), torch.zeros(10, dtype=torch.float64)


def log_sum_exps() -> Iterator[Problem]:
    for seed in range(4):
        slopes, offsets = normal(60, 10, seed=seed), normal(60, seed=seed + 10)

        def maximum(x: Tensor, a: Tensor = slopes, b: Tensor = offsets) -> Tensor:
            return torch.logsumexp(a @ x + b, dim=0)

        yield differentiable(maximum), torch.zeros(10, dtype=torch.float64)


FAMILIES: dict[str, list[Problem]] = {
    "rosenbrock": list(rosenbrocks()),
    "identity Hessian": [quadratic(spread(0, 0), seed) for seed in range(3)],
    "near-identity Hessian": [quadratic(spread(-0.5, 0.5), seed) for seed in range(3)],
    "condition 1e6": [quadratic(spread(-3, 3), seed) for seed in range(3)],
    "condition 1e6, steep": [quadratic(spread(0, 6), seed) for seed in range(3)],
    "condition 1e6, flat": [quadratic(spread(-6, 0), seed) for seed in range(3)],
    "steep": [quadratic(spread(3.5, 4.5), seed) for seed in range(3)],
    "flat": [quadratic(spread(-4.5, -3.5), seed) for seed in range(3)],
    "logistic regression": list(logistic_regressions()),
    "log-sum-exp": list(log_sum_exps()),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_finds_the_minimum_of_scipy_with_no_more_evaluations(family: str) -> None:
    ours_in_all = theirs_in_all = 0
    for function, start in FAMILIES[family]:
        ours, theirs = Recorder(function), Recorder(function)
        found = minimize(ours, start, max_iterations=2000)
        their_point, their_value = scipy_bfgs(theirs, start)

        assert found.value <= their_value + 4 * EPSILON * abs(their_value)
        torch.testing.assert_close(found.point, their_point, rtol=1e-4, atol=1e-4)
        gap = ours.values[0] - found.value
        ours_in_all += ours.evaluations_to(found.value + 1e-10 * gap)
        theirs_in_all += theirs.evaluations_to(found.value + 1e-10 * gap)
    # Here and there luck, or a first step of 1 where SciPy's is shorter, costs an evaluation.
    assert ours_in_all <= 1.05 * theirs_in_all


@pytest.mark.parametrize("family", FAMILIES)
def test_goes_on_to_the_precision_of_float64(family: str) -> None:
    """Far beyond what values can show: their precision would leave 1e-8 in the gradient."""
    for function, start in FAMILIES[family]:
        found = minimize(function, start, max_iterations=2000)
        _, first_gradient = function(start)
        assert float(found.gradient.norm()) <= 1e-12 * float(first_gradient.norm())


@pytest.mark.parametrize("family", ["logistic regression", "log-sum-exp"])
def test_the_rounding_of_float64_ends_the_search_without_a_fight(family: str) -> None:
    for function, start in FAMILIES[family]:
        found = minimize(function, start, max_iterations=2000)
        assert found.reason is StopReason.BELOW_NOISE
        assert found.evaluations <= 1.3 * found.iterations


# --- counts, reasons and the best point ----------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 6),
    seed=st.integers(0, 1000),
    height=st.floats(0, 5),
    scale=st.floats(-3, 3),
)
def test_returns_the_best_point_seen_and_counts_what_it_did(
    size: int, seed: int, height: float, scale: float
) -> None:
    """Wavy bowls, whose searches leave lower points behind than those they accept."""
    frequencies = 3 * normal(size, size, seed=seed)

    def bowl(x: Tensor) -> Tensor:
        return 10**scale * ((x @ x) / 2 + height * torch.cos(frequencies @ x).sum())

    recorder = Recorder(differentiable(bowl))
    start = 3 * normal(size, seed=seed + 1)
    found = minimize(recorder, start, max_iterations=60)
    assert found.evaluations == len(recorder.values)
    assert found.iterations <= 60
    rounding = 4 * EPSILON * max(1.0, abs(found.value))
    assert found.value <= min(recorder.values) + rounding
    value, gradient = recorder.function(found.point)
    assert math.isclose(value, found.value, rel_tol=1e-12, abs_tol=rounding)
    torch.testing.assert_close(gradient, found.gradient)


def test_a_lower_point_passed_by_on_the_way_is_returned() -> None:
    """A parabola with a pit, whose wall is too steep for the trial in it to be accepted."""

    def function(x: Tensor) -> tuple[float, Tensor]:
        if x > 0.95:
            return -5.0, torch.full_like(x, 10.0)
        return float((x - 0.5) ** 2), 2 * (x - 0.5)

    found = minimize(function, torch.zeros(1, dtype=torch.float64))
    assert found.iterations > 1
    assert (found.value, float(found.point), float(found.gradient)) == (-5.0, 1.0, 10.0)


def test_a_failed_search_falls_back_on_the_steepest_direction_once() -> None:
    clean, start = quadratic(spread(-0.5, 0.5), seed=0)
    evaluations = 0

    def failing(last: int) -> Function:
        def function(point: Tensor) -> tuple[float, Tensor]:
            nonlocal evaluations
            evaluations += 1
            value, gradient = clean(point)
            return (math.nan if 5 < evaluations <= last else value), gradient

        return function

    found = minimize(failing(5 + 20), start, max_iterations=100)  # for the first search only
    assert found.value < 1e-20
    evaluations = 0
    found = minimize(failing(1000), start, max_iterations=100)
    assert found.reason is StopReason.NO_DECREASE
    assert found.evaluations == evaluations <= 5 + 2 * 20
    assert clean(found.point)[0] == found.value < clean(start)[0]


def test_evaluations_are_those_that_were_told() -> None:
    function, start = quadratic(spread(-0.5, 0.5), seed=0)
    recorder = Recorder(function)
    found = minimize(recorder, start, initial=function(start), max_iterations=5)
    assert found.evaluations == len(recorder.values) >= 5


def test_an_identity_hessian_takes_one_step() -> None:
    function, start = quadratic(spread(0, 0), seed=0)
    found = minimize(function, start, max_iterations=1)
    assert found.evaluations == 2
    assert found.value < 1e-28


def test_the_iteration_limit_is_kept_and_named() -> None:
    function, start = quadratic(spread(-3, 3), seed=0)
    found = minimize(function, start, max_iterations=7)
    assert found.iterations == 7
    assert found.reason is StopReason.ITERATION_LIMIT
    assert str(found.reason) == "the iteration limit was reached"
    assert torch.equal(minimize(function, start, max_iterations=0).point, start)


def test_a_start_at_the_minimum_stays_there() -> None:
    start = torch.zeros(3, dtype=torch.float64)
    found = minimize(differentiable(lambda x: 56 + x @ x), start)
    assert torch.equal(found.point, start)
    assert (found.iterations, found.evaluations) == (0, 1)
    assert found.reason is StopReason.ZERO_GRADIENT


def test_a_flat_function_is_at_its_minimum() -> None:
    start = normal(4, seed=0)
    found = minimize(lambda x: (1.0, torch.zeros_like(x)), start)
    assert torch.equal(found.point, start)
    assert found.reason is StopReason.ZERO_GRADIENT


def test_no_variables_at_all() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    found = minimize(lambda x: (1.0, torch.zeros_like(x)), empty)
    assert found.reason is StopReason.ZERO_GRADIENT


def test_one_variable() -> None:
    start = torch.tensor([3.0], dtype=torch.float64)
    found = minimize(differentiable(lambda x: (x.cosh() + x).sum()), start)
    assert math.isclose(float(found.point), -math.asinh(1), rel_tol=1e-14)


@pytest.mark.parametrize("scale", [1e-10, 1e-5, 1e5, 1e10])
def test_extreme_scales_of_the_function(scale: float) -> None:
    start = normal(5, seed=0)
    found = minimize(differentiable(lambda x: scale * (x.cosh() - 1).sum()), start)
    assert found.value <= 1e-6 * scale


# --- beyond the finite ---------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_a_log_barrier(scale: float) -> None:
    """x − log(1 − x²)·scale in each variable is NaN outside; its minimum solves a quadratic."""
    start = torch.full((4,), 0.9, dtype=torch.float64)
    found = minimize(differentiable(lambda x: (scale * (x - torch.log(1 - x**2))).sum()), start)
    expected = torch.full_like(start, 1 - math.sqrt(2))
    torch.testing.assert_close(found.point, expected, rtol=0, atol=1e-7)


def test_an_overflowing_exponential() -> None:
    """e^x − cx, whose first step from 8 goes to where e^(−x) would be infinite."""
    powers = torch.tensor([2.0, 5.0, 11.0], dtype=torch.float64)
    found = minimize(
        differentiable(lambda x: (x.exp() + (-x).exp() - powers * x).sum()),
        torch.full((3,), 8.0, dtype=torch.float64),
        max_iterations=100,
    )
    torch.testing.assert_close(found.point, torch.asinh(powers / 2), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    "formula",
    [lambda x: -x.sum(), lambda x: -(x**2).sum(), lambda x: -(x**3).sum(), lambda x: x.sum()],
)
def test_unbounded_functions_end_with_a_lower_finite_point(
    formula: Callable[[Tensor], Tensor],
) -> None:
    start = torch.ones(3, dtype=torch.float64)
    found = minimize(differentiable(formula), start)
    assert found.reason in (StopReason.NO_DECREASE, StopReason.ITERATION_LIMIT)
    assert math.isfinite(found.value)
    assert found.value < -1e6
    assert found.evaluations <= 1 + 20 * 30


@pytest.mark.parametrize(
    ("value", "slope"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_a_start_that_is_not_finite_is_returned_as_it_is(value: float, slope: float) -> None:
    start = normal(3, seed=0)
    gradient = torch.tensor([1.0, slope, 1.0], dtype=torch.float64)
    found = minimize(lambda _: (value, gradient), start)
    assert found.reason is StopReason.START_NOT_FINITE
    assert torch.equal(found.point, start)
    assert (found.iterations, found.evaluations) == (0, 1)


def test_a_gradient_too_large_to_be_squared_ends_the_search() -> None:
    start = torch.ones(3, dtype=torch.float64)
    found = minimize(lambda x: (1e200 * float(x.sum()), torch.full_like(x, 1e200)), start)
    assert found.reason is StopReason.NO_DECREASE
    assert torch.equal(found.point, start)


def test_a_function_finite_only_at_the_start_is_left_there() -> None:
    start = normal(3, seed=0)

    def function(x: Tensor) -> tuple[float, Tensor]:
        return (1.0 if torch.equal(x, start) else math.nan), torch.ones_like(x)

    found = minimize(function, start)
    assert found.reason is StopReason.NO_DECREASE
    assert torch.equal(found.point, start)
    assert found.value == 1.0


# --- rough functions, wrong gradients, bad input -------------------------------------------------


def test_a_kink_ends_near_its_bottom() -> None:
    weights = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    recorder = Recorder(differentiable(lambda x: (weights * x).abs().sum() + 0.5 * (x @ x)))
    found = minimize(recorder, torch.tensor([3.0, -2.0, 1.0], dtype=torch.float64))
    assert found.reason in (StopReason.NO_DECREASE, StopReason.ITERATION_LIMIT)
    assert found.value == min(recorder.values)
    assert found.value < 0.1  # from 19


def test_a_gradient_of_the_wrong_sign_leaves_the_start_alone() -> None:
    function, start = quadratic(spread(0, 1), seed=0)
    found = minimize(lambda x: (function(x)[0], -function(x)[1]), start)
    assert found.reason is StopReason.NO_DECREASE
    assert torch.equal(found.point, start)


def test_what_the_function_raises_is_passed_on() -> None:
    def function(_: Tensor) -> tuple[float, Tensor]:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        minimize(function, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize("start", [np.zeros(2, np.float32), np.zeros((2, 2))])
def test_a_start_of_another_kind_is_refused(start: Vector) -> None:
    with pytest.raises(ValueError, match="start must be a one-dimensional float64"):
        BFGS(start, 0.0, start)


@pytest.mark.parametrize(
    ("name", "value"), [("noise", -1.0), ("noise", math.nan), ("max_iterations", -1)]
)
def test_arguments_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be"):
        minimize(lambda x: (0.0, x), torch.zeros(2, dtype=torch.float64), **{name: value})
