"""Recorded curvature products are those of the dense matrix and of the plain product."""

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import Objective
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.contract_probe import PROBE_SAMPLES
from tests.engines import RECORDING, device_of, objective_on, recorded_in
from tests.optimizers.nets import classes, net
from tests.terms import dense, laplace, points, small_net, two_at_once


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


def equation(net: nn.Module, x: Tensor) -> Tensor:
    return laplace(net, x.detach().requires_grad_())


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def zeros(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.float64, device=device)


def move(parameters: list[Tensor]) -> None:
    with torch.no_grad():
        for p in parameters:
            p.add_(0.1 * torch.randn_like(p))


@pytest.mark.parametrize("engine", RECORDING)
def test_recorded_products_by_a_kept_jacobian_are_those_of_the_dense_matrix(engine: str) -> None:
    model, device = small_net().to(device_of(engine)), device_of(engine)
    trained: list[Tensor] = [*model.parameters()]
    ours = objective_on(engine, model, squares, forward=equation)
    vectors = torch.randn(2, ours.parameters.numel, dtype=torch.float64).to(device)
    curvature = Curvature()
    for seed, count in ((0, 30), (1, 30), (2, 20)):  # recorded, replayed, and recorded anew
        x = points(count, seed).to(device)
        product = curvature.at(ours, (x, zeros(count, device)))
        assert product.keeps_jacobian
        found = [product(vector) for vector in vectors]
        matrix = dense(model, equation, x)
        for one, vector in zip(found, vectors, strict=True):
            torch.testing.assert_close(one, matrix @ vector, rtol=1e-10, atol=1e-12)
        move(trained)
    assert "product gauss-newton" in recorded_in(ours)


@pytest.mark.parametrize("engine", RECORDING)
def test_products_with_a_coefficient_that_the_forward_pass_holds_are_not_recorded(
    engine: str,
) -> None:
    """In a recording its column of J would be zero, as a recording has parameters of its own."""
    model, device = small_net().to(device_of(engine)), device_of(engine)
    held = nn.Parameter(torch.ones(1, dtype=torch.float64, device=device))
    model.register_parameter("coefficient", held)

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return equation(net, x) - held * x[:, 0]

    ours = objective_on(engine, model, squares, forward=forward)
    x = points(30).to(device)
    vector = torch.randn(ours.parameters.numel, dtype=torch.float64).to(device)
    curvature = Curvature()
    with pytest.warns(UserWarning, match="holds 'coefficient' itself"):
        found = curvature.at(ours, (x, zeros(30, device)))(vector)
    expected = dense(model, forward, x) @ vector
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert "product gauss-newton" not in recorded_in(ours)


@pytest.mark.parametrize("engine", RECORDING)
def test_products_by_autograd_are_recorded_where_rows_cannot_be_had(engine: str) -> None:
    """With many points, unlike with those of the check, a layer is called with two of each."""
    model, device = small_net().to(device_of(engine)), device_of(engine)
    trained: list[Tensor] = [*model.parameters()]

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        return equation(net, x) if len(x) <= PROBE_SAMPLES else two_at_once(net, x)

    ours = objective_on(engine, model, squares, forward=forward)
    vector = torch.randn(ours.parameters.numel, dtype=torch.float64).to(device)
    curvature, x = Curvature(), points(30).to(device)
    for _ in range(2):
        product = curvature.at(ours, (x, zeros(30, device)))
        expected = dense(model, forward, x) @ vector
        torch.testing.assert_close(product(vector), expected, rtol=1e-10, atol=1e-12)
        assert not product.keeps_jacobian
        move(trained)
    assert "product gauss-newton" in recorded_in(ours)
