"""Hessian-Free, nonlinear CG and the adapters on a GPU: the same as on the CPU."""

from typing import Any

import pytest
import torch
from torch import nn

from krylov_descent import LBFGS, FirstOrder, HessianFree, NonlinearCG
from tests.optimizers.nets import classes, net, parameters_of


@pytest.mark.gpu
@pytest.mark.parametrize("data_on_gpu", [True, False])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (HessianFree, {"damping": 1.0, "chunk_size": 30}),
        (NonlinearCG, {"iterations": 3}),
        (LBFGS, {"iterations": 3}),
        (FirstOrder, {"lr": 0.01, "batch_size": 16}),
        (FirstOrder, {"lr": 0.01, "batch_size": 16, "clip_norm": 0.1, "cuda_graphs": True}),
    ],
)
def test_steps_are_those_of_the_cpu(kind: Any, options: Any, data_on_gpu: bool) -> None:
    data = classes(dtype=torch.float64)
    on_cpu, on_gpu = net(torch.float64), net(torch.float64).cuda()
    expected = kind(on_cpu, nn.CrossEntropyLoss(), **options)
    optimizer = kind(on_gpu, nn.CrossEntropyLoss(), **options)
    there = (data[0].cuda(), data[1].cuda()) if data_on_gpu else data
    for _ in range(2):
        theirs, ours = expected.step(data), optimizer.step(there)
        assert ours.loss_after == pytest.approx(theirs.loss_after, rel=1e-6)
    torch.testing.assert_close(parameters_of(on_gpu).cpu(), parameters_of(on_cpu))


@pytest.mark.gpu
def test_products_in_tf32_are_nearly_those_of_float32() -> None:
    """Hessian-Free with layers that cuBLAS has tensor cores for; the same gradient, other steps."""
    data = torch.randn(512, 64, device="cuda"), torch.randn(512, 64, device="cuda")
    losses, gradients = [], []
    for tf32 in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).cuda()
        optimizer = HessianFree(model, nn.MSELoss(), damping=0.1, tf32=tf32)
        results = [optimizer.step(data) for _ in range(3)]
        losses.append([result.loss_after for result in results])
        gradients.append(results[0].gradient_norm)
    assert gradients[0] == gradients[1]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


class Rebinding(torch.optim.Optimizer):
    """Gradient descent that gives the parameters a new place at every step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad


@pytest.mark.gpu
def test_parameters_that_move_within_an_epoch_are_seen() -> None:
    losses = []
    for recorded in (True, False):
        optimizer = FirstOrder(
            net(torch.float64).cuda(),
            nn.CrossEntropyLoss(),
            Rebinding,
            lr=0.3,
            batch_size=20,
            cuda_graphs=recorded,
        )
        losses.append([optimizer.step(classes(dtype=torch.float64)).loss for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
