"""Products by a kept Jacobian, beside a dense Jacobian by torch.func and products by autograd."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Term
from krylov_descent.curvature import kept_jacobian
from krylov_descent.curvature.kept_jacobian import Room
from krylov_descent.curvature.products import Curvature, CurvatureProduct
from krylov_descent.objective.objective import Objective
from tests.matrices import numbers
from tests.terms import (
    Residual,
    dense,
    derivative,
    laplace,
    points,
    product_at,
    small_net,
    terms_of,
    two_outputs,
)


class Unknown(nn.Module):
    """A net beside two unknown coefficients."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_net()
        self.speed = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.sources = nn.Parameter(torch.tensor([0.2, -0.3], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def with_unknowns(net: Unknown, x: Tensor) -> Tensor:
    return net.speed**2 * derivative(net, x) - net.sources[0] * x[:, 0] + net.sources[1]


def without_a_bias() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)).double()


def with_a_tied_layer() -> nn.Module:
    torch.manual_seed(2)
    layer = nn.Linear(4, 4)
    return nn.Sequential(
        nn.Linear(2, 4), nn.Tanh(), layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(4, 1)
    ).double()


def with_a_frozen_layer() -> nn.Module:
    net = small_net()
    net[0].requires_grad_(False)
    return net


def with_a_frozen_weight() -> nn.Module:
    net = small_net()
    net[0].weight.requires_grad_(False)
    return net


def at_two_places(net: nn.Module, x: Tensor) -> Tensor:
    return derivative(net, x) - derivative(net, 1 - x)


def along_a_path(net: nn.Module, x: Tensor) -> Tensor:
    """The mean slope over five points that belong to each sample."""
    t = torch.linspace(0, 1, 5, dtype=x.dtype)[None, :, None]
    return derivative(net, t * x[:, None]).mean(1)


CASES: dict[str, tuple[Callable[[], nn.Module], Residual]] = {
    "second derivatives": (small_net, laplace),
    "two outputs": (small_net, two_outputs),
    "two places": (small_net, at_two_places),
    "points along a path": (small_net, along_a_path),
    "unknown coefficients": (Unknown, with_unknowns),
    "no bias": (without_a_bias, derivative),
    "a layer used twice": (with_a_tied_layer, derivative),
    "a frozen layer": (with_a_frozen_layer, laplace),
    "a frozen weight": (with_a_frozen_weight, derivative),
}


@pytest.mark.parametrize("case", CASES)
def test_products_equal_the_dense_matrix(case: str) -> None:
    make, residual = CASES[case]
    net = make()
    product = product_at(net, {"equation": Term(residual, points(20))})
    assert product.by_jacobian
    matrix = dense(net, residual, points(20))
    for seed in range(2):
        v = numbers(len(matrix), seed=seed)
        torch.testing.assert_close(product(v), matrix @ v, rtol=1e-10, atol=1e-12)


def test_several_terms_and_weight_decay_are_those_of_products_by_autograd() -> None:
    def at(**settings: Any) -> CurvatureProduct:
        net = small_net()
        groups = [{"params": net[0].parameters(), "weight_decay": 0.3}]
        groups.append({"params": net[2].parameters(), "weight_decay": 0.0})
        return product_at(net, terms_of(), params=groups, **settings)

    kept, by_autograd = at(), at(activation_memory=100)
    assert (kept.by_jacobian, by_autograd.by_jacobian) == (True, False)
    v = numbers(kept.objective.parameters.numel, seed=3)
    torch.testing.assert_close(kept(v), by_autograd(v), rtol=1e-10, atol=1e-12)


def test_micro_batches_have_their_own_rows() -> None:
    whole, pieces = (
        product_at(small_net(), terms_of()),
        product_at(small_net(), terms_of(), micro_batch=7),
    )
    assert pieces.by_jacobian
    assert len(pieces.batches) > 1
    v = numbers(whole.objective.parameters.numel, seed=3)
    torch.testing.assert_close(pieces(v), whole(v), rtol=1e-10, atol=1e-12)


def by_transforms(net: nn.Module, x: Tensor) -> Tensor:
    def u(point: Tensor) -> Tensor:
        found: Tensor = net(point[None])
        return found[0, 0]

    slopes: Tensor = torch.func.vmap(torch.func.grad(u))(x)
    return slopes[:, 0]


def with_a_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 1)).double()


def of_stacked_points(net: nn.Module, x: Tensor) -> Tensor:
    """The difference of two slopes, from one call of the net for both."""
    left, right = derivative(net, torch.cat([x, 1 - x])).chunk(2)
    return left - right


def of_a_matrix(net: Any, x: Tensor) -> Tensor:
    """The last weight is used by a product of matrices, too."""
    weight: Tensor = net[2].weight
    return derivative(net, x) + (x @ weight[:, :2].T)[:, 0]


@pytest.mark.parametrize(
    ("make", "residual"),
    [
        (small_net, by_transforms),
        (with_a_norm, derivative),
        (small_net, of_stacked_points),
        (small_net, of_a_matrix),
        (small_net, lambda net, x: derivative(net, x)[:, None] * torch.arange(1.0, 6.0)),
        (small_net, lambda net, x: net(x)),
    ],
    ids=["transforms", "a norm", "stacked points", "another use", "five outputs", "no derivative"],
)
def test_other_models_have_products_by_autograd(
    make: Callable[[], nn.Module], residual: Residual
) -> None:
    net = make()
    product = product_at(net, {"equation": Term(residual, points(20))})
    assert not product.by_jacobian
    matrix = dense(net, residual, points(20))
    v = numbers(len(matrix), seed=0)
    torch.testing.assert_close(product(v), matrix @ v, rtol=1e-10, atol=1e-12)


def test_rows_that_cannot_be_made_later_are_no_error() -> None:
    """Batches of more than 10 points call the net for two halves."""

    def residual(net: nn.Module, x: Tensor) -> Tensor:
        if len(x) <= 10:
            return derivative(net, x)
        return torch.cat([derivative(net, part) for part in x.chunk(2)])

    net = small_net()
    product = product_at(net, {"equation": Term(residual, points(20))})
    matrix = dense(net, residual, points(20))
    v = numbers(len(matrix), seed=0)
    torch.testing.assert_close(product(v), matrix @ v, rtol=1e-10, atol=1e-12)
    assert not product.keeps_jacobian


def test_outputs_may_have_a_number_that_all_samples_share() -> None:
    class WithSpeed(Unknown):
        def forward(self, x: Tensor) -> Any:
            return derivative(self.net, x), self.speed

    def loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        slope, speed = outputs
        return (slope - speed * targets).square()

    net, x = WithSpeed(), points(20)
    product = Curvature().at(Objective(net, loss), (x, torch.ones(20).double()))
    assert not product.by_jacobian
    v = numbers(product.objective.parameters.numel, seed=0)
    assert product(v).isfinite().all()


def test_steps_are_the_same_but_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> tuple[list[float], Tensor, KSD]:
        net = small_net()
        optimizer = KSD(net, terms_of(), dimension=8, bfgs_iterations=10)
        losses = [optimizer.step().loss_after for _ in range(3)]
        return losses, optimizer.objective.parameters.copy(), optimizer

    by_jacobian = trained()
    monkeypatch.setattr(kept_jacobian, "MOST_OUTPUTS", 0)
    by_autograd = trained()
    assert by_jacobian[2].curvature.jacobian_bytes < by_autograd[2].curvature.jacobian_bytes
    torch.testing.assert_close(by_jacobian[0], by_autograd[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(by_jacobian[1], by_autograd[1], rtol=1e-4, atol=1e-6)


def test_memory_is_used_again_when_its_owner_is_gone() -> None:
    class Owner:
        pass

    room, first = Room(), Owner()

    def take(owner: Owner, rows: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return room.take(owner, rows, 5, dtype=dtype, device=torch.device("cpu"))

    one, two = take(first, 4), take(first, 2)
    addresses = one.data_ptr(), two.data_ptr()
    assert len(set(addresses)) == 2
    other = Owner()
    apart = take(other, 4)
    assert apart.data_ptr() not in addresses
    del first, other
    assert take(Owner(), 3).data_ptr() == apart.data_ptr()
    assert take(Owner(), 3, torch.float32).dtype is torch.float32
