"""A small net with three terms, of which one differentiates it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent import Term
from krylov_descent.curvature.products import Curvature, CurvatureProduct
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.terms import Terms

Residual = Callable[[Any, Tensor], Tensor]


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def points(count: int, seed: int = 0) -> Tensor:
    return torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)).double()


def derivative(net: nn.Module, x: Tensor) -> Tensor:
    """∂u/∂x₀ [N] at points that need not require a gradient."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return slope[..., 0]


def two_outputs(net: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([derivative(net, x), net(x)[:, 0] ** 2], 1)


def laplace(net: nn.Module, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    second = (torch.autograd.grad(first[:, i].sum(), x, create_graph=True)[0] for i in range(2))
    return sum((row[:, i] for i, row in enumerate(second)), first.new_zeros(len(x))) + 1.0


def two_at_once(net: nn.Module, x: Tensor) -> Tensor:
    """∂(u(x) + u(1 − x))/∂x₀ + u(x), with both points of a sample in one batch."""
    x = x.detach().requires_grad_()
    both = net(torch.stack([x, 1 - x]).reshape(-1, 2)).reshape(2, -1)
    (slope,) = torch.autograd.grad(both.sum(), x, create_graph=True)
    residuals: Tensor = slope[:, 0] + both[0]
    return residuals


def wiggly(net: nn.Module, x: Tensor) -> Tensor:
    residuals: Tensor = net(x) - (40 * x).sin().prod(1, keepdim=True)
    return residuals


def wide_net_and_term(
    device: torch.device, subset_size: int | None = None
) -> tuple[nn.Sequential, dict[str, Term]]:
    """A net that can fit twenty of the 400 points without the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 1)).double().to(device)
    term = Term(wiggly, points(400).to(device), weight=2.0, subset_size=subset_size)
    return net, {"equation": term}


def terms_of(**weights: float) -> dict[str, Term]:
    sensors = points(7, 2)
    return {
        "equation": Term(laplace, points(20), weight=weights.get("equation", 1.0)),
        "boundary": Term(lambda net, x: net(x), points(6, 1), weight=weights.get("boundary", 5.0)),
        "data": Term(
            (sensors, sensors.sum(1, keepdim=True)), nn.MSELoss(), weight=weights.get("data", 0.5)
        ),
    }


def dense(net: nn.Module, residual: Residual, x: Tensor) -> Tensor:
    """JᵀJ·2/rows, by differentiating the residual at one point after the other."""
    trained = [p for p in net.parameters() if p.requires_grad]
    rows = []
    for row in residual(net, x.requires_grad_()).reshape(-1).unbind():
        found = torch.autograd.grad(row, trained, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([gradient.reshape(-1) for gradient in found]))
    matrix = torch.stack(rows).detach()
    return 2 * matrix.T @ matrix / len(matrix)


def product_at(net: nn.Module, terms: dict[str, Term], **settings: Any) -> CurvatureProduct:
    objective = Objective(net, terms, **settings)
    assert isinstance(objective.terms, Terms)
    like, group = objective.parameters.tensors[0], {"seed": 0, "steps": 0}
    objective.terms.evaluate(objective.losses_by_term, like, group, objective.ranks)
    return Curvature().at(objective, objective.terms.samples)
