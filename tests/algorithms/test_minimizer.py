"""The protocol of asking and telling, as both minimisers keep it."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import BFGS, Vector
from krylov_descent.algorithms.conjugate_directions import ConjugateDirections
from krylov_descent.algorithms.minimizer import Minimizer, minimize

SIZE = 6
Start = Callable[[], tuple[Minimizer[Any, Any], Callable[[Any], tuple[float, Any]]]]


def valley(x: Vector) -> tuple[float, Vector]:
    """Rosenbrock's function, by hand."""
    across, along = x[1:] - x[:-1] ** 2, 1 - x[:-1]
    gradient = np.zeros_like(x)
    gradient[1:] = 200 * across
    gradient[:-1] -= 400 * x[:-1] * across + 2 * along
    return float(100 * across @ across + along @ along), gradient


def valley_of_tensors(x: Tensor) -> tuple[float, Tensor]:
    value, gradient = valley(x.numpy())
    return value, torch.from_numpy(gradient)


def begin_bfgs() -> tuple[BFGS, Callable[[Vector], tuple[float, Vector]]]:
    start = np.full(SIZE, -1.0)
    return BFGS(start, *valley(start), max_iterations=12), valley


def begin_directions() -> tuple[ConjugateDirections, Callable[[Tensor], tuple[float, Tensor]]]:
    start = torch.full((SIZE,), -1.0, dtype=torch.float64)
    method = ConjugateDirections(start, *valley_of_tensors(start), max_iterations=12)
    return method, valley_of_tensors


begun = pytest.mark.parametrize("begin", [begin_bfgs, begin_directions])


def bits(point: Any) -> bytes:
    return np.asarray(point).tobytes()


def assert_same(one: Any, other: Any) -> None:
    assert bits(one.point) == bits(other.point)
    assert (one.value, one.iterations, one.evaluations, one.reason) == (
        other.value,
        other.iterations,
        other.evaluations,
        other.reason,
    )


@begun
def test_step_by_step_is_what_the_driver_does(begin: Start) -> None:
    method, function = begin()
    asked: list[bytes] = []

    def recorded(point: Any) -> tuple[float, Any]:
        asked.append(bits(point))
        return function(point)

    driven = minimize(method, recorded)
    assert len(asked) == driven.evaluations > 12

    method, function = begin()
    for expected in asked:
        assert method.result is None
        assert bits(method.point) == expected
        assert bits(method.point) == expected  # asking changes nothing
        method.tell(*function(method.point))
    assert method.result is not None
    assert_same(method.result, driven)


@begun
def test_the_end_is_the_best_point_and_is_told_nothing_more(begin: Start) -> None:
    method, function = begin()
    found = minimize(method, function)
    assert found.value < function(begin()[0].point)[0]
    assert function(found.point)[0] == pytest.approx(found.value, rel=1e-12)
    assert bits(method.point) == bits(found.point)
    with pytest.raises(RuntimeError, match=r"ended \(the iteration.*\): read `result`"):
        method.tell(*function(method.point))
    assert method.result is found
    assert minimize(method, function) is found


@begun
def test_an_evaluation_that_failed_is_asked_for_again(begin: Start) -> None:
    method, function = begin()
    undisturbed = minimize(*begin())
    calls = 0

    def failing(point: Any) -> tuple[float, Any]:
        nonlocal calls
        calls += 1
        if calls in (1, 7):
            raise RuntimeError("out of memory")
        return function(point)

    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            minimize(method, failing)
    assert_same(minimize(method, failing), undisturbed)


@begun
def test_two_at_a_time_do_not_know_of_each_other(begin: Start) -> None:
    alone = minimize(*begin())
    methods = [begin(), begin()]
    while any(method.result is None for method, _ in methods):
        points = [method.point for method, _ in methods]  # both are known before either is told
        for (method, function), point in zip(methods, points, strict=True):
            method.tell(*function(point))
    for method, _ in methods:
        assert method.result is not None
        assert_same(method.result, alone)


@begun
@pytest.mark.parametrize("value", [math.nan, math.inf, 1.0])
def test_what_is_not_finite_is_too_far_and_no_warning(begin: Start, value: float) -> None:
    method, function = begin()
    first = method.point
    start, _ = function(begin()[0].point)
    _, gradient = function(first)
    method.tell(value, math.inf * gradient)
    assert method.result is None
    origin = np.full(SIZE, -1.0)
    length = np.linalg.norm(np.asarray(method.point) - origin)
    assert length < np.linalg.norm(np.asarray(first) - origin)
    assert minimize(method, function).value < start
