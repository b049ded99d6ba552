"""Torch's L-BFGS behind the adapter, number for number as without it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import LBFGS, Objective, Status
from tests.optimizers.nets import (
    classes,
    net,
    parameters_of,
    through_a_file,
)


def test_steps_are_those_of_torchs_own_loop_bit_for_bit() -> None:
    # 64 samples: a power of two, so that a mean before or after the sum is the same number.
    data = classes(64, torch.float64)
    model, other = net(torch.float64), net(torch.float64)
    adapter = LBFGS(model, nn.CrossEntropyLoss(), iterations=6)
    torchs = torch.optim.LBFGS(
        other.parameters(), max_iter=6, history_size=10, line_search_fn="strong_wolfe"
    )
    evaluations = 0

    def closure() -> float:
        nonlocal evaluations
        evaluations += 1
        torchs.zero_grad()
        losses = nn.functional.cross_entropy(other(data[0]), data[1], reduction="none")
        loss = losses.sum() / 64
        loss.backward()
        return loss.item()

    for _ in range(4):
        result = adapter.step(data)
        evaluations = 0
        torchs.step(closure)
        assert torch.equal(parameters_of(model), parameters_of(other))
        assert result.status is Status.MOVED
        assert result.iterations == 6
        assert result.evaluations == evaluations
        assert result.passes == pytest.approx(evaluations + 1)
    value = Objective(model, nn.CrossEntropyLoss()).value(data)
    assert result.loss_after == pytest.approx(value, rel=1e-12)


def test_groups_may_differ_in_weight_decay() -> None:
    inputs, targets = torch.randn(40, 3).double(), torch.randn(40, 1).double() + 2
    model = nn.Linear(3, 1).double()
    groups = [{"params": [model.weight], "weight_decay": 0.6}, {"params": [model.bias]}]
    optimizer = LBFGS(model, nn.MSELoss(), groups)
    for _ in range(3):
        optimizer.step((inputs, targets))
    columns = torch.cat([inputs, torch.ones(40, 1).double()], 1)
    decay = torch.diag(torch.tensor([0.6, 0.6, 0.6, 0.0]).double())
    ridge = torch.linalg.solve(2 * columns.T @ columns / 40 + decay, 2 * columns.T @ targets / 40)
    torch.testing.assert_close(model.weight.detach().T, ridge[:3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.bias.detach(), ridge[3], rtol=1e-5, atol=1e-6)


def test_the_history_has_the_length_asked_for() -> None:
    model = net()
    optimizer = LBFGS(model, nn.CrossEntropyLoss(), history=3)
    optimizer.step(classes())
    (state,) = optimizer.state.values()
    assert len(state["old_dirs"]) == len(state["old_stps"]) == 3


def test_without_a_decrease_nothing_changes_and_the_history_is_forgotten() -> None:
    model = net()
    optimizer = LBFGS(model, nn.CrossEntropyLoss())
    optimizer.step(classes())
    before = parameters_of(model)

    class Cliff(nn.Module):
        """The net, but not a number as soon as it moves."""

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
            moved = not torch.equal(parameters_of(model), before)
            return losses * (torch.nan if moved else 1.0)

    broken = LBFGS(model, Cliff())
    broken.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    result = broken.step(classes())
    assert result.status is Status.NO_DECREASE
    assert torch.equal(parameters_of(model), before)
    assert not broken.state


def trained(model: nn.Module, loss: Any = None) -> LBFGS:
    optimizer = LBFGS(model, loss or nn.CrossEntropyLoss(), iterations=4)
    for _ in range(3):
        assert optimizer.step(classes()).status is Status.MOVED
    return optimizer


@pytest.mark.parametrize("layer", [0, 2])
def test_frozen_parameters_stay_and_the_others_begin_anew(layer: int) -> None:
    model = net()
    optimizer = trained(model)
    model[layer].requires_grad_(False)
    frozen = parameters_of(model[layer])
    twin = copy.deepcopy(model)
    fresh = LBFGS(twin, nn.CrossEntropyLoss(), iterations=4)
    for _ in range(3):
        result, expected = optimizer.step(classes()), fresh.step(classes())
        assert result.status is Status.MOVED
        assert (result.loss_after, result.iterations) == (expected.loss_after, expected.iterations)
    assert torch.equal(parameters_of(model[layer]), frozen)
    model[layer].requires_grad_(True)
    assert optimizer.step(classes()).status is Status.MOVED
    assert not torch.equal(parameters_of(model[layer]), frozen)


def test_a_history_of_other_tensors_of_the_same_size_is_forgotten() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    optimizer = trained(model)
    model[2].requires_grad_(False)
    model[0].requires_grad_(True)
    fresh = LBFGS(copy.deepcopy(model), nn.CrossEntropyLoss(), iterations=4)
    assert optimizer.step(classes()).loss_after == fresh.step(classes()).loss_after


def test_an_error_on_the_way_leaves_frozen_parameters_alone() -> None:
    model = net()
    before: Tensor | None = None

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if before is not None and not torch.equal(parameters_of(model), before):
            raise ArithmeticError
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    optimizer = trained(model, loss)
    model[0].requires_grad_(False)
    before = parameters_of(model)
    with pytest.raises(ArithmeticError):
        optimizer.step(classes())
    assert torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("bias", [True, False])  # without it the history has a parameter's shape
def test_the_model_may_change_its_precision_between_steps(bias: bool) -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))
            self.bias = nn.Parameter(torch.zeros(1)) if bias else 0.0

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight + self.bias).tanh()

    model, (inputs, labels) = Line(), classes()
    optimizer = LBFGS(model, nn.MSELoss(), iterations=2)
    losses = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        data = inputs.to(dtype), labels.to(dtype)
        losses += [optimizer.step(data).loss_after for _ in range(2)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    ("option", "value"), [("iterations", 0), ("history", 0), ("lr", -1.0), ("weight_decay", -1.0)]
)
def test_bad_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        LBFGS(net(), nn.CrossEntropyLoss(), **{option: value})


def test_a_learning_rate_of_zero_changes_nothing() -> None:
    model = net()
    before = parameters_of(model)
    result = LBFGS(model, nn.CrossEntropyLoss(), lr=0.0).step(classes())
    assert result.status is Status.NO_DECREASE
    assert torch.equal(parameters_of(model), before)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = net()
    optimizer = LBFGS(model, nn.CrossEntropyLoss(), iterations=4)
    for _ in range(3):
        optimizer.step(classes())
    saved = through_a_file([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint")
    losses = [optimizer.step(classes()).loss_after for _ in range(3)]

    fresh = net(seed=9)
    fresh.load_state_dict(saved[0])
    resumed = LBFGS(fresh, nn.CrossEntropyLoss(), iterations=4)
    resumed.load_state_dict(saved[1])
    assert [resumed.step(classes()).loss_after for _ in range(3)] == losses
    assert torch.equal(parameters_of(fresh), parameters_of(model))

    # And not by chance: without the history it goes another way.
    other = net()
    other.load_state_dict(saved[0])
    forgetful = LBFGS(other, nn.CrossEntropyLoss(), iterations=4)
    assert forgetful.step(classes()).loss_after != losses[0]
