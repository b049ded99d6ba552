"""CG against dense solves; Martens' stopping rule and grid by hand."""

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import scipy.sparse.linalg
import torch
from torch import Tensor

from krylov_descent.algorithms.conjugate_gradient import (
    CGResult,
    CGStop,
    conjugate_gradient,
    has_stalled,
    iterate_grid,
)

# The iterates that were chosen in the 300 iterations of Martens' own run on CURVES, those that
# were CG's last left out.
CHOSEN_IN_REFERENCE_RUN = {5, 7, 9, 11, 15, 19, 25, 32, 41, 54, 69, 90, 117, 152, 197}


def system(size: int, condition: float = 100.0) -> tuple[Tensor, Tensor]:
    """A symmetric positive definite matrix of a given condition, and a right-hand side."""
    rotation = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    eigenvalues = torch.logspace(0, math.log10(condition), size, dtype=torch.float64)
    return rotation * eigenvalues @ rotation.T, torch.randn(size, dtype=torch.float64)


def run(A: Tensor, g: Tensor, *, M: Tensor | None = None, **options: Any) -> CGResult:
    """CG on dense matrices, to the end unless told otherwise."""
    solve: Callable[[Tensor], Tensor] = (
        torch.clone if M is None else lambda v: torch.linalg.solve(M, v)
    )
    settings = {"tolerance": 0.0, **options}
    return conjugate_gradient(lambda v: A @ v, g, solve=solve, **settings)


def quadratic(A: Tensor, g: Tensor, x: Tensor) -> float:
    return float(x @ A @ x / 2 + g @ x)


# The solution ---------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_n_iterations_solve_a_system_of_n(preconditioned: bool, started: bool) -> None:
    A, g = system(12, 10.0)
    M = system(12, 3.0)[0] if preconditioned else None
    start = torch.randn(12, dtype=torch.float64) if started else None
    found = run(A, g, M=M, start=start, max_iterations=12)
    torch.testing.assert_close(found.last.point, torch.linalg.solve(A, -g), rtol=1e-9, atol=1e-9)


def test_the_value_of_every_iterate_is_that_of_the_quadratic_there() -> None:
    A, g = system(40)
    found = run(A, g, start=torch.randn(40, dtype=torch.float64), max_iterations=30)
    for iterate in found.iterates:
        assert iterate.value == pytest.approx(quadratic(A, g, iterate.point), rel=1e-10)


def test_it_goes_the_same_way_as_scipy() -> None:
    A, g = system(40)
    M = torch.diag(A)
    for iterations in (1, 2, 5, 10):
        found = run(A, g, M=torch.diag(M), max_iterations=iterations)
        expected, _ = scipy.sparse.linalg.cg(
            A.numpy(), -g.numpy(), rtol=0, maxiter=iterations, M=torch.diag(1 / M).numpy()
        )
        torch.testing.assert_close(found.last.point, torch.tensor(expected))


def test_each_iterate_is_the_best_of_its_krylov_space() -> None:
    # Without a start x_i minimises φ over the span of (M⁻¹A)ᵏM⁻¹g, k < i.
    A, g = system(30)
    M = system(30, 10.0)[0]
    found = run(A, g, M=M, max_iterations=7)
    vectors = [torch.linalg.solve(M, g)]
    for _ in range(6):
        vectors.append(torch.linalg.solve(M, A @ vectors[-1]))
    for iterate in found.iterates:
        V = torch.linalg.qr(torch.stack(vectors[: iterate.iteration], 1)).Q
        best = V @ torch.linalg.solve(V.T @ A @ V, -V.T @ g)
        torch.testing.assert_close(iterate.point, best, rtol=1e-7, atol=1e-9)


def test_a_perfect_preconditioner_needs_one_iteration() -> None:
    A, g = system(20, 1e4)
    found = run(A, g, M=A, max_iterations=1)
    torch.testing.assert_close(found.last.point, torch.linalg.solve(A, -g))


def test_the_start_and_the_gradient_are_left_alone() -> None:
    A, g = system(8)
    start = torch.randn(8, dtype=torch.float64)
    before = g.clone(), start.clone()
    run(A, g, start=start, max_iterations=8)
    assert torch.equal(g, before[0])
    assert torch.equal(start, before[1])


def test_a_start_costs_one_product_more() -> None:
    A, g = system(8)
    calls = 0

    def product(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return A @ v

    for start, expected in ((None, 6), (g, 7)):
        calls = 0
        conjugate_gradient(product, g, solve=torch.clone, start=start, max_iterations=6)
        assert calls == expected


# Why it stops ---------------------------------------------------------------------------------


def test_a_solved_system_stops_it() -> None:
    A = 2.0 * torch.eye(4, dtype=torch.float64)
    g = torch.ones(4, dtype=torch.float64)
    found = run(A, g)
    assert found.stop is CGStop.SOLVED
    assert found.last.iteration == 1
    torch.testing.assert_close(found.last.point, -g / 2)
    again = run(A, g, start=-g / 2)
    assert (again.stop, again.last.iteration) == (CGStop.SOLVED, 0)


def test_the_cap_stops_it() -> None:
    A, g = system(60, 1e4)
    found = run(A, g, max_iterations=23)
    assert found.stop is CGStop.ITERATION_LIMIT
    assert found.last.iteration == 23


def test_negative_curvature_stops_it_at_the_iterate_before() -> None:
    # Along the gradient (1, 1, 1) the curvature is positive, so one iteration is made; the plane
    # of the first two directions has negative curvature.
    A = torch.diag(torch.tensor([4.0, 2.0, -1.0], dtype=torch.float64))
    g = torch.ones(3, dtype=torch.float64)
    found = run(A, g)
    assert found.stop is CGStop.NEGATIVE_CURVATURE
    one = run(A, g, max_iterations=1)
    assert found.last.iteration == 1
    assert torch.equal(found.last.point, one.last.point)


@pytest.mark.parametrize("curvature", [-1.0, 0.0])
def test_negative_curvature_at_once_hands_back_the_start(curvature: float) -> None:
    A = curvature * torch.eye(3, dtype=torch.float64)
    g = torch.ones(3, dtype=torch.float64)
    found = run(A, g)
    assert (found.stop, found.last.iteration) == (CGStop.NEGATIVE_CURVATURE, 0)
    assert torch.equal(found.last.point, torch.zeros_like(g))
    start = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert torch.equal(run(A, g, start=start).last.point, start)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stops_it_at_the_iterate_before(bad: float) -> None:
    A, g = system(20)
    calls = 0

    def product(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return A @ v if calls < 7 else torch.full_like(v, bad)

    found = conjugate_gradient(product, g, solve=torch.clone, tolerance=0.0)
    assert (found.stop, found.last.iteration) == (CGStop.NOT_FINITE, 6)
    assert all(bool(iterate.point.isfinite().all()) for iterate in found.iterates)
    torch.testing.assert_close(found.last.point, run(A, g, max_iterations=6).last.point)


def test_a_start_that_is_not_finite_is_handed_back_as_such() -> None:
    A, g = system(4)
    found = run(A, g * math.nan)
    assert (found.stop, found.last.iteration) == (CGStop.NOT_FINITE, 0)


@pytest.mark.parametrize(
    "options", [{"max_iterations": 0}, {"tolerance": -1e-3}, {"tolerance": math.nan}]
)
def test_bad_arguments_are_refused_by_name(options: dict[str, Any]) -> None:
    A, g = system(4)
    with pytest.raises(ValueError, match=next(iter(options))):
        run(A, g, **options)


# Martens' rule --------------------------------------------------------------------------------


def test_the_rule_waits_for_more_than_ten_iterations() -> None:
    assert not has_stalled([-1.0] * 10, 5e-4)
    assert has_stalled([-1.0] * 11, 5e-4)


def test_the_rule_compares_with_ten_iterations_ago() -> None:
    # i = 11, k = 10: (φ11 - φ1)/φ11 against 10·5e-4 = 0.005.
    assert has_stalled([-0.9951] + [-1.0] * 10, 5e-4)
    assert not has_stalled([-0.9949] + [-1.0] * 10, 5e-4)
    # i = 12: φ2, not φ1, is looked at.
    assert has_stalled([-0.1, -0.9951] + [-1.0] * 10, 5e-4)
    assert not has_stalled([-0.9951, -0.1] + [-1.0] * 10, 5e-4)


def test_the_gap_grows_with_the_iterations() -> None:
    # i = 120, k = 12: φ108, against 12·5e-4 = 0.006.
    before, after = [-0.1] * 107, [-1.0] * 12
    assert has_stalled([*before, -0.9941, *after], 5e-4)
    assert not has_stalled([*before, -0.9939, *after], 5e-4)
    # i = 121, k = 13: φ108 still.
    assert has_stalled([*before, -0.9936, *after, -1.0], 5e-4)
    assert not has_stalled([*before, -0.9934, *after, -1.0], 5e-4)


def test_the_rule_does_not_hold_while_the_quadratic_is_not_negative() -> None:
    assert not has_stalled([1.0] * 11, 5e-4)
    assert not has_stalled([0.0] * 11, 5e-4)


def test_cg_stops_at_the_first_iteration_that_the_rule_names() -> None:
    A, g = system(200, 1e4)
    found = run(A, g, tolerance=5e-4)
    assert found.stop is CGStop.STALLED
    stopped = found.last.iteration
    assert 11 < stopped < 200
    # The same from dense arithmetic: φ of the best point of each Krylov space.
    values = [run(A, g, max_iterations=i).last for i in range(1, stopped + 1)]
    phi = [quadratic(A, g, iterate.point) for iterate in values]
    assert [has_stalled(phi[:i], 5e-4) for i in range(1, stopped + 1)] == [
        i == stopped for i in range(1, stopped + 1)
    ]


def test_with_negative_values_only_a_small_decrease_stops_it() -> None:
    # One cluster: solved to rounding after an iteration, but the rule waits for the eleventh.
    A = torch.diag(torch.linspace(1.0, 1.0 + 1e-6, 50, dtype=torch.float64))
    found = run(A, torch.ones(50, dtype=torch.float64), tolerance=5e-4)
    assert found.stop in (CGStop.STALLED, CGStop.SOLVED)
    assert found.last.iteration <= 11


# The grid -------------------------------------------------------------------------------------


def test_the_grid_is_that_of_the_reference_run() -> None:
    grid = list(islice(iterate_grid(), 16))
    assert set(grid[:-1]) == CHOSEN_IN_REFERENCE_RUN
    assert grid[-1] > 250


@pytest.mark.parametrize(
    ("iterations", "expected"),
    [(3, [3]), (5, [5]), (8, [5, 7, 8]), (11, [5, 7, 9, 11]), (20, [5, 7, 9, 11, 15, 19, 20])],
)
def test_the_iterates_are_those_of_the_grid_and_the_last(
    iterations: int, expected: list[int]
) -> None:
    A, g = system(60, 1e4)
    found = run(A, g, max_iterations=iterations)
    assert [iterate.iteration for iterate in found.iterates] == expected
    for iterate in found.iterates:
        alone = run(A, g, max_iterations=iterate.iteration).last
        assert torch.equal(iterate.point, alone.point)


def test_float32_gets_as_far_as_rounding_lets_it() -> None:
    A, g = system(50)
    found = run(A.float(), g.float(), max_iterations=50)
    assert found.last.point.dtype == torch.float32
    exact = torch.linalg.solve(A, -g)
    assert float((found.last.point - exact).norm() / exact.norm()) < 1e-3
