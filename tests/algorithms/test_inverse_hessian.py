"""The BFGS matrix: what it learns, that it stays definite, and its formula."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from krylov_descent.algorithms.inverse_hessian import InverseHessian
from tests.functions import normal, spread


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 20), seed=st.integers(0, 1000), updates=st.integers(1, 10))
def test_the_matrix_learns_what_it_is_told(size: int, seed: int, updates: int) -> None:
    matrix = InverseHessian(size)
    hessian = np.diag(spread(-1, 1, size).numpy())
    for k in range(updates):
        step = normal(size, seed=seed + k).numpy()
        matrix.update(step, hessian @ step)
        np.testing.assert_allclose(matrix.times(hessian @ step), step, rtol=1e-7, atol=1e-7)
    columns = np.stack([matrix.times(unit) for unit in np.eye(size)])
    np.testing.assert_allclose(columns, columns.T, rtol=1e-7, atol=1e-7)
    assert np.linalg.eigvalsh(columns).min() > 0


def test_the_matrix_ignores_curvature_that_is_not_positive() -> None:
    matrix = InverseHessian(3)
    step = normal(3, seed=0).numpy()
    sideways = np.cross(step, normal(3, seed=1).numpy())
    for change in (-step, np.zeros_like(step), sideways):
        matrix.update(step, change)
    assert matrix.is_identity
    assert np.array_equal(matrix.times(step), step)


def test_updates_are_those_of_the_textbook() -> None:
    """H ← (I − ρsyᵀ)H(I − ρysᵀ) + ρssᵀ with ρ = 1/sᵀy, from γI with γ = max(1, sᵀy/yᵀy)."""
    size = 6
    matrix, hessian = InverseHessian(size), np.diag(spread(-1, 1, size).numpy())
    expected = np.eye(size)
    for k in range(5):
        s = normal(size, seed=k).numpy()
        y = hessian @ s
        if k == 0:
            expected *= max(1.0, (s @ y) / (y @ y))
        left = np.eye(size) - np.outer(s, y) / (s @ y)
        expected = left @ expected @ left.T + np.outer(s, s) / (s @ y)
        matrix.update(s, y)
        np.testing.assert_allclose(matrix.matrix, expected, rtol=1e-10, atol=1e-10)
    matrix.reset()
    assert matrix.is_identity
    assert np.array_equal(matrix.matrix, np.eye(size))
