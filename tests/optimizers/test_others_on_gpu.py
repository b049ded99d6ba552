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
