"""Hessian-Free where a step goes wrong, or is asked for what it cannot do."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import HessianFree, Status
from krylov_descent.algorithms.conjugate_gradient import CGStop
from tests.optimizers.nets import (
    Reversed,
    classes,
    net,
    parameters_of,
)
from tests.problems import make


def test_a_step_that_raises_the_objective_is_shortened_and_raises_the_damping() -> None:
    problem = make("mlp", "cross-entropy")
    optimizer = HessianFree(problem.model, problem.loss, damping=1e-4)
    result = optimizer.step(problem.data)
    assert result.status is Status.MOVED
    assert result.reduction_ratio == -math.inf
    assert result.rate is not None
    assert result.rate < 1
    assert math.log(result.rate, 0.8) == pytest.approx(round(math.log(result.rate, 0.8)))
    assert optimizer.damping == pytest.approx(1.5e-4)
    assert result.loss_after < result.loss_before


def test_a_step_that_never_decreases_is_rejected() -> None:
    model = net()
    before = parameters_of(model)

    def uphill(outputs: Tensor, targets: Tensor) -> Tensor:
        turned: Tensor = Reversed.apply(outputs)  # type: ignore[no-untyped-call]
        return (turned - nn.functional.one_hot(targets, 3)).square().sum(1)

    optimizer = HessianFree(model, uphill, damping=4.0)
    result = optimizer.step(classes())
    assert result.status is Status.NO_DECREASE
    assert torch.equal(parameters_of(model), before)
    assert optimizer.damping == 6.0
    assert result.reduction_ratio == -math.inf
    # 60 trials, the first of which belongs to the backtracking as well.
    assert 60 <= result.evaluations <= 60 + 16
    assert result.loss_after == result.loss_before == result.loss
    # The last iterate is where CG goes on from, all the same.
    assert optimizer._get_vector("last_iterate") is not None


class Saddle(nn.Module):
    """(a, b) → a² - b² + b⁴ for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.ab = nn.Parameter(torch.tensor([0.0, 0.1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.ab.unbind()
        return x * (a**2 - b**2 + b**4)


def test_negative_curvature_along_the_gradient_is_damped_away() -> None:
    model, x = Saddle(), torch.ones(8, 1, dtype=torch.float64)
    optimizer = HessianFree(
        model, lambda outputs, _: outputs.sum(1), curvature="hessian", damping=0.5
    )
    before = parameters_of(model)
    result = optimizer.step((x, None))
    assert result.status is Status.NO_DECREASE
    assert "curvature" in result.reason
    assert result.evaluations == 1
    assert torch.equal(parameters_of(model), before)
    refused = 1
    while not (result := optimizer.step((x, None))).status.moved:
        refused += 1
        assert torch.equal(parameters_of(model), before)
    # The Hessian is -2 + 12·0.01 = -1.88 there: 0.5·1.5⁴ = 2.53 is the first above it.
    assert refused == 4
    for _ in range(25):
        optimizer.step((x, None))
    assert abs(float(model.ab[1].detach())) == pytest.approx(math.sqrt(0.5), rel=1e-4)


def test_negative_curvature_later_on_uses_the_iterates_before() -> None:
    torch.manual_seed(2)
    model = net(torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    optimizer = HessianFree(model, nn.CrossEntropyLoss(), curvature="hessian", damping=1e-2)
    stops = []
    for _ in range(10):
        result = optimizer.step(classes(dtype=torch.float64))
        stops.append(result.reason)
        if result.reason == str(CGStop.NEGATIVE_CURVATURE):
            assert result.iterations >= 1
    assert str(CGStop.NEGATIVE_CURVATURE) in stops


def test_a_product_that_is_not_finite_refuses_the_step_and_forgets_the_start() -> None:
    class Edge(torch.autograd.Function):
        """Squares whose second derivative is infinite."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x: Tensor = ctx.saved_tensors[0]
            # Zero to the power ½ has an infinite slope: 0·∞ in the second derivative.
            return gradient * (2 * x + (x - x.detach()).abs().sqrt())

    model = net()
    before = parameters_of(model)
    optimizer = HessianFree(
        model,
        lambda z, _: Edge.apply(z).sum(1),  # type: ignore[no-untyped-call]
        curvature="hessian",
        damping=2.0,
    )
    result = optimizer.step(classes())
    assert result.status is Status.NOT_FINITE
    assert "curvature" in result.reason
    assert torch.equal(parameters_of(model), before)
    assert optimizer.damping == 3.0
    assert optimizer._get_vector("last_iterate") is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("damping", 0.0),
        ("damping", math.inf),
        ("cg_iterations", 0),
        ("chunk_size", 0),
        ("chunk_size", 1.5),
        ("curvature", "newton"),
        ("lr", -1.0),
        ("weight_decay", -1e-3),
    ],
)
def test_bad_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        HessianFree(net(), nn.CrossEntropyLoss(), **{option: value})


def test_a_chunk_larger_than_the_data_is_refused() -> None:
    model = net()
    before = parameters_of(model)
    with pytest.raises(ValueError, match="chunk_size"):
        HessianFree(model, nn.CrossEntropyLoss(), chunk_size=61).step(classes())
    assert torch.equal(parameters_of(model), before)
