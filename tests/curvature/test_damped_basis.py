"""Residual rows and the basis of a damped step, beside gradients and products by autograd."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import Term
from krylov_descent.curvature.damped_basis import DampedBasis, UnsuitedError
from krylov_descent.curvature.products import CurvatureProduct
from krylov_descent.curvature.residual_rows import residual_rows
from krylov_descent.objective.batches import Batch
from tests.matrices import numbers
from tests.terms import derivative, points, product_at, small_net, terms_of, two_outputs

PROBLEMS: dict[str, Callable[[], dict[str, Term]]] = {
    "three terms": terms_of,
    "a term of weight zero": lambda: terms_of(boundary=0.0),
    "two residuals for each point": lambda: {"equation": Term(two_outputs, points(8))},
}


def batch_of(product: CurvatureProduct) -> Batch:
    (batch,) = product.batches
    return batch


@pytest.mark.parametrize("problem", PROBLEMS)
def test_residuals_have_the_loss_the_gradient_and_the_curvature(problem: str) -> None:
    product = product_at(small_net(), PROBLEMS[problem]())
    network, batch = product.objective.network, batch_of(product)
    found = residual_rows(network, batch)
    losses = network.sample_losses(batch)
    torch.testing.assert_close(found.residuals.square().sum() / 2, losses.detach().sum())
    gradient = network.parameters.flatten(network.gradients(losses))
    torch.testing.assert_close(found.matrix.T @ found.residuals, gradient)
    v = numbers(network.parameters.numel, seed=1)
    curved = product.scale * (found.matrix.T @ (found.matrix @ v))
    torch.testing.assert_close(curved, product(v), rtol=1e-10, atol=1e-12)


def basis_of(product: CurvatureProduct, gradient: Tensor, slots: Tensor | None = None) -> Tensor:
    work = DampedBasis(product, batch_of(product), gradient, 1e-3, False, 20)
    if slots is None:
        basis = work.run()
    else:
        basis = work.build(residual_rows(product.objective.network, work.batch), slots)
    subspace = basis.subspace
    rows = subspace.rows.stored[: subspace.rank]
    assert basis.products == 0
    assert subspace.kept == list(range(subspace.rank))
    curvature = torch.stack([rows @ product(row) for row in rows])
    torch.testing.assert_close(subspace.curvature, curvature, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(subspace.gram, torch.eye(len(rows)).double(), rtol=0, atol=1e-6)
    assert subspace.squared_gradient == pytest.approx(float(gradient @ gradient))
    return rows


def test_the_subspace_has_the_curvature_of_all_residuals() -> None:
    product = product_at(small_net(), terms_of())
    gradient = numbers(product.objective.parameters.numel, seed=2)
    rows = basis_of(product, gradient)
    slots = torch.zeros(20, rows.shape[1]).double()
    in_place = basis_of(product, gradient, slots)
    assert in_place.data_ptr() == slots.data_ptr()
    torch.testing.assert_close(in_place, rows)
    assert not slots[len(rows) :].any()


def test_rows_without_numbers_are_no_basis() -> None:
    product = product_at(small_net(), terms_of())
    batch = batch_of(product)
    work = DampedBasis(product, batch, torch.ones(1), 1e-3, False, 20)
    rows = residual_rows(product.objective.network, batch)
    with pytest.raises(UnsuitedError, match="no system"):
        work.build(rows._replace(matrix=rows.matrix * torch.nan))


@pytest.mark.parametrize(("dimensions", "enough"), [(1, False), (2, True)])
def test_points_on_a_line_have_too_few_directions(dimensions: int, enough: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(dimensions, 40), nn.Tanh(), nn.Linear(40, 1)).double()
    product = product_at(net, {"equation": Term(derivative, points(60)[:, :dimensions])})
    gradient = numbers(product.objective.parameters.numel, seed=2)
    work = DampedBasis(product, batch_of(product), gradient, 1e-3, True, 20)
    if enough:
        assert work.run().subspace.rank
    else:
        with pytest.raises(UnsuitedError, match="few directions"):
            work.run()
