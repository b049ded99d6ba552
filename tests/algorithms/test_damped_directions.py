"""Damped directions beside the n × n system of Levenberg and Marquardt, in NumPy."""

import math

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.damped_directions import (
    COUNT,
    FACTOR,
    damped_directions,
    independent_residuals,
    least_damping,
)

LEAST = least_damping(torch.float64)


def problem(rows: int = 6, columns: int = 15) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    return matrix, torch.randn(rows, dtype=torch.float64, generator=generator)


def test_directions_solve_the_damped_system() -> None:
    matrix, residuals = problem()
    found = damped_directions(matrix, residuals, 1e-2)
    J, r = matrix.numpy(), residuals.numpy()
    size = np.abs(J @ J.T).sum(0).max()
    assert len(found.dampings) == COUNT
    np.testing.assert_allclose(found.dampings[1:], FACTOR * found.dampings[:-1])
    assert found.dampings[COUNT // 2] == 1e-2
    rows = found.rows.numpy()
    for damping, overlaps in zip(found.dampings, found.overlaps, strict=True):
        step = -np.linalg.solve(J.T @ J + damping * size * np.eye(15), J.T @ r)
        step /= np.linalg.norm(step)
        np.testing.assert_allclose(overlaps, rows @ step, atol=1e-6)
        np.testing.assert_allclose(rows.T @ (rows @ step), step, atol=1e-6)


def test_rows_are_orthonormal_and_as_many_as_the_directions_span() -> None:
    matrix, residuals = problem(rows=3)
    found = damped_directions(matrix, residuals, 1e-2)
    assert len(found.rows) == 3  # all directions are combinations of three gradients
    np.testing.assert_allclose(found.rows @ found.rows.T, np.eye(3), atol=1e-6)


def test_a_step_along_a_direction_has_its_damping() -> None:
    found = damped_directions(*problem(), 1e-2)
    for damping, overlaps in zip(found.dampings, found.overlaps, strict=True):
        assert found.best_damping(overlaps) == damping


def test_dampings_below_rounding_are_left_out() -> None:
    found = damped_directions(*problem(), LEAST)
    assert found.dampings[0] >= LEAST / 10
    assert len(found.dampings) == COUNT // 2 + 1


def test_residuals_that_depend_on_each_other_have_directions() -> None:
    """JJᵀ is singular, and only the damping makes it regular."""
    matrix, residuals = problem()
    found = damped_directions(torch.cat([matrix, matrix]), torch.cat([residuals, residuals]), LEAST)
    assert len(found.rows)
    assert found.rows.isfinite().all()


def test_without_a_number_there_is_no_direction() -> None:
    matrix, residuals = problem()
    matrix[0, 0] = math.inf
    found = damped_directions(matrix, residuals, 1e-2)
    assert found.rows.shape == (0, 15)
    assert not len(found.dampings)


def test_residuals_count_that_are_not_those_of_others() -> None:
    matrix, _ = problem()
    assert independent_residuals(matrix) == 6
    assert independent_residuals(torch.cat([matrix, matrix[:3] + matrix[1:4]])) == 6
    assert independent_residuals(matrix * math.inf) == 0
