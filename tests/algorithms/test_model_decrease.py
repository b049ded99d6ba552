"""The decrease of the quadratic model in leading subspaces, against dense solutions."""

import numpy as np
import pytest
import torch

from krylov_descent.algorithms.basis_storage import Alone, Storage
from krylov_descent.algorithms.metric import Diagonal
from krylov_descent.algorithms.model_decrease import model_decreases
from krylov_descent.algorithms.subspace import krylov_basis


def test_it_is_that_of_the_minimum_over_the_first_directions() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(40, 12, generator=generator, dtype=torch.float64)
    H, g = root.t() @ root, torch.randn(12, generator=generator, dtype=torch.float64)
    D = torch.rand(12, generator=generator, dtype=torch.float64) + 0.1
    subspace = krylov_basis(
        lambda v: H @ v, Diagonal(D), g, [], 6, placement=Alone(12), storage=Storage()
    )
    found = model_decreases(subspace.curvature, subspace.squared_gradient)
    assert subspace.squared_gradient == pytest.approx(float(g @ (g / D)))
    V = subspace.rows.stored
    for k in range(1, 7):
        first = V[:k]
        step = first.t() @ torch.linalg.solve(first @ H @ first.t(), -(first @ g))
        assert found[k - 1] == pytest.approx(float(-(g @ step) - step @ H @ step / 2))


@pytest.mark.parametrize("values", [(4.0, 1.0, 0.0), (4.0, 1.0, -2.0), (0.0, 0.0, 0.0)])
def test_without_positive_curvature_it_is_finite_and_grows(values: tuple[float, ...]) -> None:
    orthogonal, _ = torch.linalg.qr(torch.eye(3, dtype=torch.float64) + 0.3)
    curvature = orthogonal @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ orthogonal.t()
    found = model_decreases((curvature + curvature.t()) / 2, 2.0)
    assert np.isfinite(found).all()
    assert (np.diff(found) >= 0).all()
    assert found[0] > 0


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("rows", [3, 20, 100])
def test_any_negative_curvature_is_shifted_enough(rows: int, size: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    for _ in range(20):
        drawn = torch.randn(rows, rows, generator=generator, dtype=torch.float64)
        found = model_decreases(size * (drawn + drawn.t()), 1.0)
        assert np.isfinite(found).all()
        assert (np.diff(found) >= 0).all()
