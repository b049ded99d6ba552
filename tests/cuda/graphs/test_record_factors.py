"""Recorded Kronecker factors are the plain ones."""

import pytest
import torch
from torch import nn

from krylov_descent import KroneckerFactors, Objective
from krylov_descent.cuda.graphs import record_factors
from krylov_descent.objective.batches import Batch
from tests.engines import RECORDING, device_of, objective_on, recorded_in
from tests.optimizers.nets import classes, net


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss()])
@pytest.mark.parametrize("rest", [nn.Identity, nn.LayerNorm])  # of which one has the diagonal
def test_recorded_factors_are_the_plain_ones(
    loss: nn.Module, rest: type[nn.Module], engine: str
) -> None:
    inputs, targets = (t.to(device_of(engine)) for t in classes(60, torch.float64))
    model = net(torch.float64).insert(1, rest(6)).to(inputs)
    if isinstance(loss, nn.MSELoss):
        targets = inputs[:, :3].sin()
    objectives = objective_on(engine, model, loss), Objective(model, loss)
    made = KroneckerFactors(), KroneckerFactors()
    for _ in range(3):
        for objective, factors in zip(objectives, made, strict=True):
            factors.update(objective, (inputs, targets))
            factors.learn(objective, [Batch(inputs, targets, len(inputs))])
        for ours, theirs in zip(made[0].tensors, made[1].tensors, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn_like(p))
    assert any(name.startswith("factors") for name in recorded_in(objectives[0]))


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("why", ["two batches", "large factors"])
def test_factors_that_are_not_recorded_are_made_as_they_are(
    why: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, targets = (t.to(device_of(engine)) for t in classes(60, torch.float64))
    model, loss = net(torch.float64).to(inputs), nn.CrossEntropyLoss()
    batches = [Batch(inputs, targets, 60)]
    if why == "two batches":
        batches = [Batch(inputs[:30], targets[:30], 30), Batch(inputs[30:], targets[30:], 30)]
    else:
        monkeypatch.setattr(record_factors, "LARGEST_FACTORS", 10)
    objectives, made = (objective_on(engine, model, loss), Objective(model, loss)), []
    for objective in objectives:
        factors = KroneckerFactors()
        factors.update(objective, (inputs, targets))
        factors.learn(objective, batches)
        made.append(factors.tensors)
    assert not any(name.startswith("factors") for name in recorded_in(objectives[0]))
    for ours, theirs in zip(*made, strict=True):
        torch.testing.assert_close(ours, theirs)
