"""Recorded curvature products are those of the dense matrix and of the plain product."""

import pytest
import torch
from torch import nn

from krylov_descent import Objective
from krylov_descent.curvature.products import Curvature, CurvatureKind
from tests.engines import RECORDING, device_of, objective_on, recorded_in
from tests.optimizers.nets import classes, net
from tests.terms import laplace, points, small_net


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("kind", ["gauss-newton", "hessian", "fisher"])
def test_recorded_products_are_the_plain_ones_at_every_point(
    kind: CurvatureKind, engine: str
) -> None:
    model, device = net(torch.float64).to(device_of(engine)), device_of(engine)
    inputs, targets = (t.to(device) for t in classes(60, torch.float64))
    ours = objective_on(engine, model, nn.CrossEntropyLoss())
    theirs = Objective(model, nn.CrossEntropyLoss())
    vectors = torch.randn(3, ours.parameters.numel, dtype=torch.float64).to(device)
    curvature, expected = Curvature(kind), Curvature(kind)
    for count in (60, 60, 40):  # recorded at the first, replayed, and recorded anew
        data = inputs[:count], targets[:count]
        product, plain = curvature.at(ours, data), expected.at(theirs, data)
        found = [product(vector) for vector in vectors]  # none overwrites another
        for one, vector in zip(found, vectors, strict=True):
            torch.testing.assert_close(one, plain(vector), rtol=1e-10, atol=1e-13)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    assert f"product {kind}" in recorded_in(ours)


@pytest.mark.parametrize("engine", RECORDING)
def test_recorded_products_by_a_kept_jacobian_are_those_of_the_dense_matrix(engine: str) -> None:
    model, device = small_net().to(device_of(engine)), device_of(engine)
    trained = [*model.parameters()]

    def equation(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return laplace(net, x.detach().requires_grad_())

    def residuals(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs - targets).square()

    ours = objective_on(engine, model, residuals, forward=equation)
    vectors = torch.randn(2, ours.parameters.numel, dtype=torch.float64).to(device)
    curvature = Curvature()
    for seed, count in ((0, 30), (1, 30), (2, 20)):  # recorded, replayed, and recorded anew
        x = points(count, seed).to(device)
        product = curvature.at(ours, (x, torch.zeros(count, dtype=torch.float64, device=device)))
        assert product.keeps_jacobian
        found = [product(vector) for vector in vectors]
        rows = []
        for row in equation(model, x).unbind():
            parts = torch.autograd.grad(row, trained, retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
        matrix = torch.stack(rows).detach()
        for one, vector in zip(found, vectors, strict=True):
            expected = 2 * matrix.T @ (matrix @ vector) / count
            torch.testing.assert_close(one, expected, rtol=1e-10, atol=1e-12)
        with torch.no_grad():
            for p in trained:
                p.add_(0.1 * torch.randn_like(p))
    assert "product gauss-newton" in recorded_in(ours)
