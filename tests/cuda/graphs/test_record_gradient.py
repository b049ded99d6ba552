"""Recorded gradients, squares and mini-batches are those of the walk over the samples."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import FirstOrder, FisherDiagonal, Identity, Objective
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.layers import squared_gradients
from tests.engines import RECORDING, device_of, engine_of, objective_on, recorded_in, use
from tests.loss_cases import LOSSES
from tests.optimizers.nets import classes, net, parameters_of
from tests.problems import make

Data = tuple[Tensor, Tensor]


def on(engine: str, count: int = 60, dtype: torch.dtype = torch.float64) -> Data:
    inputs, targets = classes(count, dtype)
    return inputs.to(device_of(engine)), targets.to(device_of(engine))


def move(model: nn.Module) -> None:
    """Other parameters in the same place."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))


def check_same(found: Evaluation, expected: Evaluation) -> None:
    assert found.value == pytest.approx(expected.value, rel=1e-12)
    assert found.norm == pytest.approx(expected.norm, rel=1e-12)
    assert (found.samples, found.normaliser) == (expected.samples, expected.normaliser)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(found.squares, expected.squares, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize(
    ("model", "loss"),
    [*(("mlp", loss) for loss in LOSSES), ("sequence", "cross-entropy"), ("conv", "mean")],
)
def test_recorded_sums_are_the_plain_ones(
    model: str, loss: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fewer groups than samples, so that the squares of "sequence" are an estimate.
    monkeypatch.setattr(squared_gradients, "GROUPS", 2)
    problem, device = make(model, loss), device_of(engine)
    module = problem.model.to(device)
    criterion: Any = copy.deepcopy(problem.loss)
    if isinstance(criterion, nn.Module):
        criterion.to(device)
    data = (problem.inputs.to(device), problem.case.targets.to(device))
    recorded, plain = objective_on(engine, module, criterion), Objective(module, criterion)
    for _ in range(3):
        for name in ("value_and_gradient", "value_gradient_and_squares"):
            check_same(getattr(recorded, name)(data), getattr(plain, name)(data))
        move(module)
    assert {"gradient", "gradient and squares"} <= set(recorded_in(recorded))


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("preconditioner", [FisherDiagonal, Identity])
@pytest.mark.parametrize("decay", [[0.0, 0.0], [0.1, 0.1], [0.1, 0.2]])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_recorded_diagonals_are_the_plain_ones(
    preconditioner: Any, decay: list[float], ignored: int, engine: str
) -> None:
    model, (inputs, targets) = net(torch.float64).to(device_of(engine)), on(engine)
    groups = [
        {"params": list(model[i].parameters()), "weight_decay": own}
        for i, own in zip((0, 2), decay, strict=True)
    ]
    loss = nn.CrossEntropyLoss(ignore_index=ignored)
    ours, theirs = (
        objective_on(engine, model, loss, params=groups),
        Objective(model, loss, params=groups),
    )
    D, expected = preconditioner(), preconditioner()
    places = []
    for count in (60, 60, 60, 40):
        data = inputs[:count], targets[:count]
        check_same(found := D.update(ours, data), expected.update(theirs, data))
        assert not found.squares.numel()
        for one, other in zip(D.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
        places.append(found)  # held, so that its gradient keeps its place
        move(model)
    # Outside of steps each gradient is the caller's.
    assert len({found.gradient.data_ptr() for found in places}) == 4


@pytest.mark.parametrize("engine", RECORDING)
def test_a_gradient_is_recorded_when_it_is_asked_for_again(engine: str) -> None:
    """And not for sets in turn, of which each would take the place of the other."""
    model = net(torch.float64).to(device_of(engine))
    recorded = objective_on(engine, model, nn.CrossEntropyLoss())
    held = []
    for count in (60, 48, 60, 48, 48, 48):
        recorded.value_and_gradient(on(engine, count))
        held.append("gradient" in recorded_in(recorded))
    assert held == [False, False, False, False, True, True]


@pytest.mark.parametrize("engine", RECORDING)
def test_samples_may_stay_where_they_are_change_there_and_move(engine: str) -> None:
    """Recordings read them in place, while they stay."""
    model, (inputs, targets) = net(torch.float64).to(device_of(engine)), on(engine)
    recorded = objective_on(engine, model, nn.CrossEntropyLoss())
    plain = Objective(model, nn.CrossEntropyLoss())

    def check(x: Tensor) -> float:
        found = recorded.value_gradient_and_squares((x, targets))
        check_same(found, plain.value_gradient_and_squares((x, targets)))
        return found.value

    values = [check(inputs) for _ in range(3)][-1:]
    inputs.mul_(2)
    values.append(check(inputs))
    elsewhere = inputs / 3
    values += [check(x) for x in (elsewhere, inputs, elsewhere)][:1]
    assert len(set(values)) == 3
    assert "gradient and squares" in recorded_in(recorded)


@pytest.mark.parametrize("engine", RECORDING)
def test_autocast_around_an_objective_is_seen(engine: str) -> None:
    device = device_of(engine)
    data = on(engine, dtype=torch.float32)
    objective = objective_on(engine, net().to(device), nn.CrossEntropyLoss())
    exact = objective.value_and_gradient(data).gradient
    with torch.autocast(device.type, torch.bfloat16):
        rounded = [objective.value_and_gradient(data).gradient for _ in range(3)]
    for gradient in rounded:
        assert (gradient - exact).norm() > 1e-4 * exact.norm()
    for _ in range(3):
        again = objective.value_and_gradient(data).gradient
        torch.testing.assert_close(again, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", RECORDING)
def test_a_mean_over_nothing_is_refused(engine: str) -> None:
    model, (inputs, targets) = net(torch.float64).to(device_of(engine)), on(engine)
    objective = objective_on(engine, model, nn.CrossEntropyLoss(ignore_index=7))
    for method in (objective.value_and_gradient, objective.value_gradient_and_squares):
        for _ in range(3):
            method((inputs, targets))
        with pytest.raises(ValueError, match="every target is ignored"):
            method((inputs, torch.full_like(targets, 7)))


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler
def test_a_compiled_model_stays_compiled_where_its_gradient_is_taken(engine: str) -> None:
    compiled = torch.compile(net(torch.float64).to(device_of(engine)), backend="eager")
    objective = objective_on(engine, compiled, nn.CrossEntropyLoss())
    for _ in range(3):
        objective.value_and_gradient(on(engine))
    assert "gradient" not in recorded_in(objective)


@pytest.mark.parametrize("engine", RECORDING)
@pytest.mark.parametrize("change", ["weight decay", "frozen"])
def test_squares_are_recorded_again_for_a_model_that_is_looked_at_anew(
    change: str, engine: str
) -> None:
    """Which Linear layers to trust is read on the host, and so is found out first."""
    model = net(torch.float64).to(device_of(engine))
    objective = objective_on(engine, model, nn.CrossEntropyLoss())
    for _ in range(2):
        objective.value_gradient_and_squares(on(engine))
    assert "gradient and squares" in recorded_in(objective)
    if change == "frozen":
        model[0].bias.requires_grad_(False)
    objective.refresh([{"params": list(model.parameters()), "weight_decay": 0.1}])
    assert not recorded_in(objective)
    for _ in range(2):
        objective.value_gradient_and_squares(on(engine))
    assert "gradient and squares" in recorded_in(objective)


@pytest.mark.parametrize("engine", RECORDING)
def test_a_recorded_epoch_is_the_plain_epoch(engine: str) -> None:
    """Momentum, clipping and a last mini-batch that is smaller, bit for bit; `.grad` is kept."""
    runs = []
    for one in ("eager", engine):
        model = net(torch.float64).to(device_of(engine))
        made = FirstOrder(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD,
            lr=0.1,
            momentum=0.9,
            batch_size=7,
            clip_norm=0.1,
            cuda_graphs=True,
        )
        optimizer = use(one, made)
        losses = [optimizer.step(on(engine)).loss_after for _ in range(3)]
        assert all(p.grad is None for p in model.parameters())
        runs.append((losses, parameters_of(model)))
    assert engine_of(optimizer).graphs.names == ["mini-batch"]
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
