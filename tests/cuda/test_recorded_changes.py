"""Recorded runs of models that use a weight in a new way are those without recordings."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, LBFGS, HessianFree, KroneckerFactors, NonlinearCG
from krylov_descent.optimizers.base import DataOptimizer

pytestmark = pytest.mark.gpu

METHODS: dict[str, Callable[..., DataOptimizer]] = {
    "ksd": KSD,
    "identity": partial(KSD, preconditioner="identity"),
    "fisher": partial(KSD, curvature="fisher"),
    "hessian": partial(KSD, curvature="hessian"),
    "kronecker": lambda *args, **options: KSD(
        *args, preconditioner=KroneckerFactors(after=0), **options
    ),
    "hf": HessianFree,
    "ncg": partial(NonlinearCG, iterations=3),
    "lbfgs": partial(LBFGS, iterations=3),
}


class Changing(nn.Module):
    """A net whose first weight has another use, in the forward pass or in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.to("cuda", torch.float64)
        self.reused = self.penalty = self.held_penalty = 0.0
        self.held = [self.weight]

    @property
    def weight(self) -> Tensor:
        return next(self.net.parameters())

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.net(x)
        if self.reused:
            outputs = outputs + self.reused * x.mm(self.weight.t()).sin()[:, :3]
        return outputs

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = (outputs - targets).square().sum(1)
        if self.penalty:
            losses = losses + self.penalty * self.weight.square().sum()
        if self.held_penalty:
            losses = losses + self.held_penalty * self.held[0].square().sum()
        return losses


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    y = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    return x.cuda(), y.cuda()


def gradient_norm(model: Changing) -> float:
    x, y = samples()
    loss = model.loss(model(x), y).mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    return float(torch.cat([g.reshape(-1) for g in found]).norm())


@pytest.mark.parametrize("way", ["penalty", "reused", "held_penalty"])
@pytest.mark.parametrize("name", METHODS)
def test_a_recorded_run_knows_a_small_new_use(name: str, way: str) -> None:
    check_run(name, way, size=1e-5, since=3)


@pytest.mark.parametrize("way", ["penalty", "reused", "held_penalty"])
def test_a_recorded_run_knows_a_use_from_the_start(way: str) -> None:
    check_run("ksd", way, size=0.1, since=0)


def check_run(name: str, way: str, size: float, since: int) -> None:
    """Recorded and not, with a use of this size from this step on."""
    runs = []
    for recorded in (True, False):
        model = Changing()
        optimizer = METHODS[name](model, model.loss, cuda_graphs=recorded)
        losses = []
        for step in range(6):
            if step >= since:
                setattr(model, way, size)
            expected = gradient_norm(model)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*cannot be recorded")
                warnings.filterwarnings("ignore", message=".*computed sample by sample")
                result = optimizer.step(samples())
            assert result.gradient_norm == pytest.approx(expected, rel=1e-8)
            losses.append(result.loss)
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)
