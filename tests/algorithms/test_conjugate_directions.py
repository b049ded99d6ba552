"""Nonlinear CG on quadratics, against SciPy's, and case by case where it restarts."""

import math
import weakref
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from krylov_descent.algorithms import minimizer
from krylov_descent.algorithms.conjugate_directions import (
    ConjugateDirections,
    Formula,
    Memory,
    NonlinearCGResult,
    StopReason,
    conjugacy,
    first_step,
)
from tests.functions import Function

FORMULAS: list[Formula] = ["polak-ribiere", "hestenes-stiefel"]


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def quadratic(size: int, condition: float) -> tuple[Function, Tensor]:
    """½(x - x*)ᵀA(x - x*), and x*."""
    rotation = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    eigenvalues = torch.logspace(0, math.log10(condition), size, dtype=torch.float64)
    A, minimum = rotation * eigenvalues @ rotation.T, torch.randn(size, dtype=torch.float64)

    def function(x: Tensor) -> tuple[float, Tensor]:
        gradient = A @ (x - minimum)
        return float((x - minimum) @ gradient / 2), gradient

    return function, minimum


def rosenbrock(x: Tensor) -> tuple[float, Tensor]:
    point = x.numpy()
    value = float(scipy.optimize.rosen(point))
    return value, torch.from_numpy(scipy.optimize.rosen_der(point))


def minimize(function: Function, start: Tensor, **options: Any) -> NonlinearCGResult:
    return minimizer.minimize(ConjugateDirections(start, *function(start), **options), function)


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("size", [2, 5, 10])
def test_a_quadratic_of_n_variables_takes_n_iterations(formula: Formula, size: int) -> None:
    function, minimum = quadratic(size, 10.0)
    start = torch.zeros(size, dtype=torch.float64)
    found = minimize(function, start, formula=formula, max_iterations=size, slope_tolerance=1.01e-4)
    before = float((start - minimum).norm())
    assert float((found.point - minimum).norm()) < 1e-3 * before
    # Steepest descent with the same line search would still be far away.
    steepest = start
    for _ in range(size):
        steepest = minimize(function, steepest, max_iterations=1, slope_tolerance=1.01e-4).point
    assert float((steepest - minimum).norm()) > 20 * float((found.point - minimum).norm())


@pytest.mark.parametrize("formula", FORMULAS)
def test_rosenbrock_as_scipy_does(formula: Formula) -> None:
    start = torch.full((8,), -1.0, dtype=torch.float64)
    found = minimize(rosenbrock, start, formula=formula, max_iterations=400)
    assert float(found.point.sub(1).abs().max()) < 1e-6
    theirs = scipy.optimize.minimize(
        lambda x: float(scipy.optimize.rosen(x)),
        start.numpy(),
        jac=scipy.optimize.rosen_der,
        method="CG",
        options={"gtol": 1e-8},
    )
    assert np.abs(theirs.x - 1).max() < 1e-6
    # As far as SciPy's, for about as many evaluations.
    evaluations, memory, point, value = 1, None, start, math.inf
    while value > max(theirs.fun, 1e-16):
        one = minimize(rosenbrock, point, formula=formula, memory=memory, max_iterations=1)
        memory, point, value = one.memory, one.point, one.value
        evaluations += one.evaluations
    assert evaluations <= 1.2 * theirs.nfev


@pytest.mark.parametrize("formula", FORMULAS)
def test_going_on_from_the_memory_is_the_same_as_never_stopping(formula: Formula) -> None:
    start = torch.full((6,), -1.0, dtype=torch.float64)
    whole = minimize(rosenbrock, start, formula=formula, max_iterations=12)
    half = minimize(rosenbrock, start, formula=formula, max_iterations=5)
    rest = minimize(rosenbrock, half.point, formula=formula, memory=half.memory, max_iterations=7)
    assert torch.equal(rest.point, whole.point)
    assert rest.value == whole.value


def test_beta_by_hand() -> None:
    # g = (1, 2), g_prev = (3, 0), d_prev = (-1, 1): y = (-2, 2), gᵀy = 2.
    memory = Memory(vector(-1, 1), vector(3, 0), -1.0, 1)
    assert conjugacy("polak-ribiere", vector(1, 2), memory) == pytest.approx(2 / 9)
    assert conjugacy("hestenes-stiefel", vector(1, 2), memory) == pytest.approx(2 / 4)
    # g = (1, 0): gᵀy = -2; the plus of Polak-Ribière cuts it off, Hestenes-Stiefel keeps it.
    assert conjugacy("polak-ribiere", vector(1, 0), memory) == 0.0
    assert conjugacy("hestenes-stiefel", vector(1, 0), memory) == pytest.approx(-1.0)
    # d_prevᵀy = 0: not defined.
    flat = Memory(vector(1, 1), vector(3, 0), -1.0, 1)
    assert conjugacy("hestenes-stiefel", vector(1, 2), flat) == 0.0
    # ‖g_prev‖² underflows: nor is it there.
    tiny = Memory(vector(1, 1), vector(1e-200, 0), -1.0, 1)
    assert conjugacy("polak-ribiere", vector(1, 2), tiny) == 0.0


def test_the_first_step_has_length_one_and_later_ones_promise_as_much() -> None:
    g = vector(3, 4)
    assert first_step(-25.0, g, None) == pytest.approx(1 / 5)
    memory = Memory(vector(1, 0), g, -0.5, 1)
    assert first_step(-25.0, g, memory) == pytest.approx(0.5 / 25)
    # Nothing useful is known of the scale.
    assert first_step(-25.0, g, Memory(g, g, 0.0, 1)) == pytest.approx(1 / 5)


def first_direction(memory: Memory | None, start: Tensor) -> Tensor:
    """The direction of the first iteration from `start` on ½‖x‖²."""

    def function(x: Tensor) -> tuple[float, Tensor]:
        return float(x @ x / 2), x.clone()

    found = minimize(function, start, memory=memory, max_iterations=1)
    return torch.nn.functional.normalize(found.point - start, dim=0)


def test_it_goes_along_the_conjugate_direction_unless_a_restart_is_due() -> None:
    start = vector(1, 2)
    downhill = -start / start.norm()
    # β = gᵀy/‖g_prev‖² = 2/9, and d = -g + β d_prev still descends.
    memory = Memory(vector(-1, 1), vector(3, 0), -1.0, 1)
    conjugate = vector(-1 - 2 / 9, -2 + 2 / 9)
    torch.testing.assert_close(first_direction(memory, start), conjugate / conjugate.norm())
    torch.testing.assert_close(first_direction(None, start), downhill)
    due = Memory(memory.direction, memory.gradient, memory.promised, 0)
    torch.testing.assert_close(first_direction(due, start), downhill)


def test_a_direction_that_hardly_descends_is_dropped_for_the_gradient() -> None:
    start = vector(1, 2)
    # β = 2/9 as above, but along d_prev the objective climbs by more than the gradient descends.
    memory = Memory(vector(100, 100), vector(3, 0), -1.0, 1)
    torch.testing.assert_close(first_direction(memory, start), -start / start.norm())


def test_it_restarts_after_as_many_directions_as_variables() -> None:
    function, _ = quadratic(5, 100.0)
    start = torch.zeros(5, dtype=torch.float64)
    counts = []
    for iterations in range(1, 8):
        memory = minimize(function, start, max_iterations=iterations).memory
        assert memory is not None
        counts.append(memory.count)
    assert counts == [1, 2, 3, 4, 0, 1, 2]


def test_a_zero_gradient_ends_it() -> None:
    minimum = vector(1, 2, 3)
    found = ConjugateDirections(minimum, 0.0, torch.zeros_like(minimum)).result
    assert found is not None
    assert found.reason is StopReason.ZERO_GRADIENT
    assert found.iterations == found.evaluations == 0
    assert torch.equal(found.point, minimum)
    # One whose square is zero is as good as zero: no line search can begin with its slope.
    tiny = ConjugateDirections(minimum, 0.0, torch.full_like(minimum, 1e-200)).result
    assert tiny is not None
    assert tiny.reason is StopReason.ZERO_GRADIENT


def test_a_wrong_gradient_ends_it_without_a_move() -> None:
    def climbing(x: Tensor) -> tuple[float, Tensor]:
        return float(x @ x / 2), -x

    start = vector(1, 2, 3)
    found = minimize(climbing, start)
    assert found.reason is StopReason.NO_DECREASE
    assert torch.equal(found.point, start)


def test_a_wall_of_infinity_is_too_far() -> None:
    # -log x + x has its minimum at 1 and is infinite from 0 down.
    def barrier(x: Tensor) -> tuple[float, Tensor]:
        if bool((x <= 0).any()):
            return math.inf, torch.full_like(x, math.nan)
        return float((x - x.log()).sum()), 1 - 1 / x

    found = minimize(barrier, vector(9.0, 0.02), max_iterations=60)
    torch.testing.assert_close(found.point, vector(1.0, 1.0), rtol=1e-5, atol=1e-5)


def test_noise_in_the_values_does_not_lead_it_astray() -> None:
    function, _ = quadratic(10, 100.0)
    generator = torch.Generator().manual_seed(3)

    def noisy(x: Tensor) -> tuple[float, Tensor]:
        value, gradient = function(x)
        return value + 1e-6 * float(torch.randn((), generator=generator)), gradient

    start = torch.zeros(10, dtype=torch.float64)
    found = minimize(noisy, start, max_iterations=40, noise=1e-6)
    assert function(found.point)[0] < 2e-6
    # Without knowing the noise it would try again and again.
    assert found.evaluations < 3 * found.iterations


def test_a_kink_is_passed_along_its_floor() -> None:
    """Along −g the function climbs at once, whichever side the gradient is of."""

    def at(x: Tensor) -> tuple[float, Tensor]:
        side = 1.0 if x[0] > 0 else -1.0
        value = 3 * x[0].abs() + 0.1 * x[1] + x[1] ** 2
        return float(value), torch.stack([torch.full_like(x[0], 3 * side), 0.1 + 2 * x[1]])

    start = torch.tensor([0.0, 1.0], dtype=torch.float64)
    found = minimize(at, start)
    assert found.value < 0.1 < at(start)[0]


def test_at_most_five_gradients_are_alive() -> None:
    """Of the last step, of the base, the best, the shortest too far and the newest."""
    alive: list[weakref.ref[Tensor]] = []

    def wavy(x: Tensor) -> tuple[float, Tensor]:
        gradient = x - 9 * torch.sin(9 * x)
        alive.append(weakref.ref(gradient))
        return float((x @ x) / 2 + torch.cos(9 * x).sum()), gradient

    start = vector(3, -2, 1)
    method = ConjugateDirections(start, *wavy(start), max_iterations=30, slope_tolerance=1e-3)
    most = 0
    while method.result is None:
        told = wavy(method.point)
        gradients = sum(reference() is not None for reference in alive)
        most = max(most, gradients - len(method.bundle))
        method.tell(*told)
        del told
    assert method.evaluations > 2 * method.iterations  # there were brackets
    assert most == 5
