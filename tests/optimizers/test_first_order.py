"""Torch's optimisers behind the adapter, number for number as without it."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from krylov_descent import FirstOrder, Status
from tests.optimizers.nets import (
    classes,
    net,
    parameters_of,
    through_a_file,
)


def by_hand(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    orders: list[Tensor],
    batch_size: int,
    rates: list[float] | None = None,
    clip: float | None = None,
) -> list[float]:
    """The loop that everyone writes; the mean loss of each epoch."""
    inputs, targets = classes()
    means, made = [], 0
    for order in orders:
        total = 0.0
        for rows in order.split(batch_size):
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[made]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
            loss.backward()
            if clip is not None:
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                length = float(torch.cat([g.reshape(-1) for g in gradients]).norm())
                for gradient in gradients:
                    gradient.mul_(min(1.0, clip / length))
            optimizer.step()
            total += loss.item() * len(rows)
            made += 1
        means.append(total / len(inputs))
    return means


def orders_of(adapter: FirstOrder, epochs: int) -> list[Tensor]:
    """The permutations of the next epochs, as the adapter's generator deals them."""
    found, steps = [], adapter.steps
    for epoch in range(epochs):
        adapter.param_groups[0]["steps"] = steps + epoch
        found.append(torch.randperm(60, generator=adapter._generator()))
    adapter.param_groups[0]["steps"] = steps
    return found


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
        (torch.optim.RMSprop, {"lr": 0.005}),
        (torch.optim.Rprop, {}),
    ],
)
@pytest.mark.parametrize("batch_size", [16, 60, 100])
def test_epochs_are_those_of_a_loop_by_hand_bit_for_bit(
    kind: Any, options: dict[str, Any], batch_size: int
) -> None:
    model, other = net(), net()
    adapter = FirstOrder(model, nn.CrossEntropyLoss(), kind, batch_size=batch_size, **options)
    orders = orders_of(adapter, 3)
    results = [adapter.step(classes()) for _ in range(3)]
    means = by_hand(other, kind(other.parameters(), **options), orders, batch_size)
    assert torch.equal(parameters_of(model), parameters_of(other))
    assert [result.loss_after for result in results] == pytest.approx(means)
    assert results[1].loss_before == results[0].loss_after
    for result in results:
        assert result.status is Status.MOVED
        assert result.iterations == result.evaluations == -(-60 // batch_size)
        assert (result.samples, result.passes) == (60, 1.0)
    assert {tuple(order.tolist()) for order in orders} != {tuple(orders[0].tolist())}


def test_the_linear_schedule_falls_to_zero() -> None:
    model, other = net(), net()
    adapter = FirstOrder(
        model, nn.CrossEntropyLoss(), lr=0.02, batch_size=15, schedule="linear", epochs=3
    )
    orders = orders_of(adapter, 3)
    # Four mini-batches an epoch: 12 rates, from all of it down to a twelfth.
    rates = [0.02 * (1 - i / 12) for i in range(12)]
    by_hand(other, torch.optim.Adam(other.parameters()), orders, 15, rates)
    for _ in range(3):
        assert adapter.step(classes()).status.moved
    torch.testing.assert_close(parameters_of(model), parameters_of(other), rtol=1e-6, atol=1e-7)

    before = parameters_of(model)
    over = adapter.step(classes())
    assert over.status is Status.NO_DECREASE
    assert "learning rate" in over.reason
    assert torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("clip", [0.05, 1e6])
def test_long_gradients_are_clipped(clip: float) -> None:
    model, other, unclipped = net(), net(), net()
    make = partial(FirstOrder, optimizer=torch.optim.SGD, lr=0.5, batch_size=16)
    adapter = make(model, nn.CrossEntropyLoss(), clip_norm=clip)
    orders = orders_of(adapter, 2)
    for _ in range(2):
        adapter.step(classes())
    by_hand(other, torch.optim.SGD(other.parameters(), lr=0.5), orders, 16, clip=clip)
    torch.testing.assert_close(parameters_of(model), parameters_of(other), rtol=1e-5, atol=1e-6)
    free = make(unclipped, nn.CrossEntropyLoss())
    for _ in range(2):
        free.step(classes())
    assert torch.equal(parameters_of(model), parameters_of(unclipped)) == (clip == 1e6)


def test_a_dotted_path_is_the_class() -> None:
    models = net(), net()
    named: list[Any] = ["torch.optim.NAdam", torch.optim.NAdam]
    for model, optimizer in zip(models, named, strict=True):
        FirstOrder(model, nn.CrossEntropyLoss(), optimizer, lr=0.01).step(classes())
    assert torch.equal(parameters_of(models[0]), parameters_of(models[1]))


@pytest.mark.parametrize(
    "optimizer", ["Adam", "torch.optim.Adamm", "torch.nowhere.Adam", "", "torch.nn.Linear", print]
)
def test_what_is_no_optimiser_is_refused(optimizer: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="`optimizer`"):
        FirstOrder(net(), nn.CrossEntropyLoss(), optimizer)


def test_lbfgs_is_sent_to_its_own_adapter() -> None:
    with pytest.raises(TypeError, match=r"krylov_descent\.LBFGS"):
        FirstOrder(net(), nn.CrossEntropyLoss(), torch.optim.LBFGS)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"schedule": "cosine"}, "schedule"),
        ({"schedule": "linear"}, "epochs"),
        ({"schedule": "linear", "epochs": 0}, "epochs"),
        ({"epochs": 5}, "epochs"),
        ({"lr": -1.0}, "learning rate"),
        ({"micro_batch": 0}, "micro_batch"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        FirstOrder(net(), nn.CrossEntropyLoss(), **options)


def test_micro_batches_change_nothing_but_rounding() -> None:
    models = net(torch.float64), net(torch.float64)
    for model, micro_batch in zip(models, (None, 7), strict=True):
        optimizer = FirstOrder(
            model, nn.CrossEntropyLoss(), torch.optim.SGD, lr=0.1, micro_batch=micro_batch
        )
        optimizer.step(classes(dtype=torch.float64))
    torch.testing.assert_close(parameters_of(models[0]), parameters_of(models[1]))


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """The samples one by one, as a dataset of one's own has them."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = classes()
        return inputs[index], targets[index]


def test_datasets_and_loaders_are_shuffled_here_and_give_the_same() -> None:
    expected: Tensor | None = None
    for data in (classes(), TensorDataset(*classes()), Pairs(), DataLoader(Pairs(), batch_size=9)):
        model = net()
        FirstOrder(model, nn.CrossEntropyLoss(), batch_size=16, lr=0.01).step(data)
        if expected is None:
            expected = parameters_of(model)
        assert torch.equal(parameters_of(model), expected)


def test_a_stream_is_taken_in_its_own_order() -> None:
    inputs, targets = classes()
    model, other = net(), net()
    batches = zip(inputs.split(40), targets.split(40), strict=True)
    result = FirstOrder(model, nn.CrossEntropyLoss(), batch_size=25, lr=0.01).step(batches)
    assert result.iterations == 3  # 25, 15, 20
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01)
    for rows in torch.arange(60).split([25, 15, 20]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    assert torch.equal(parameters_of(model), parameters_of(other))


def test_class_weights_are_averaged_as_torch_does() -> None:
    weight = torch.tensor([1.0, 2.0, 4.0])
    model, other = net(), net()
    FirstOrder(model, nn.CrossEntropyLoss(weight=weight), torch.optim.SGD, lr=0.1).step(classes())
    inputs, targets = classes()
    nn.functional.cross_entropy(other(inputs), targets, weight=weight).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    torch.testing.assert_close(parameters_of(model), parameters_of(other))


# Steps that go wrong --------------------------------------------------------------------------


def test_an_epoch_that_diverges_is_undone_with_the_optimisers_state() -> None:
    model = net()
    optimizer = FirstOrder(model, nn.CrossEntropyLoss(), lr=0.01, batch_size=20)
    optimizer.step(classes())
    before, state = parameters_of(model), copy.deepcopy(optimizer.state_dict())
    inputs, targets = classes()
    inputs[41] = torch.nan
    result = optimizer.step((inputs, targets))
    assert result.status is Status.NOT_FINITE
    assert torch.equal(parameters_of(model), before)
    after = optimizer.state_dict()
    for index, kept in state["state"].items():
        for key, value in kept.items():
            assert torch.equal(after["state"][index][key], value)
    assert optimizer.steps == 2  # so that the next epoch has another order
    assert optimizer.step(classes()).status.moved


# Resuming and the torch.optim contract --------------------------------------------------------


def make_one(model: nn.Module) -> FirstOrder:
    return FirstOrder(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW,
        lr=0.02,
        batch_size=16,
        schedule="linear",
        epochs=10,
        seed=5,
    )


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = net()
    optimizer = make_one(model)
    for _ in range(3):
        optimizer.step(classes())
    saved = through_a_file([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint")
    losses = [str(optimizer.step(classes()).loss_before) for _ in range(3)]

    fresh = net(seed=9)
    fresh.load_state_dict(saved[0])
    resumed = make_one(fresh)
    resumed.load_state_dict(saved[1])
    assert [str(resumed.step(classes()).loss_before) for _ in range(3)] == losses
    assert torch.equal(parameters_of(fresh), parameters_of(model))
    assert resumed.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert resumed.steps == optimizer.steps == 6


def test_a_scheduler_of_torch_works() -> None:
    model, other = net(), net()
    adapter = FirstOrder(model, nn.CrossEntropyLoss(), torch.optim.SGD, batch_size=60, lr=0.1)
    orders = orders_of(adapter, 3)
    scheduler = torch.optim.lr_scheduler.StepLR(adapter, 1, gamma=0.5)
    for _ in range(3):
        adapter.step(classes())
        scheduler.step()
    by_hand(other, torch.optim.SGD(other.parameters()), orders, 60, [0.1, 0.05, 0.025])
    assert torch.equal(parameters_of(model), parameters_of(other))


def test_groups_have_options_of_their_own() -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    groups = [
        {"params": model[0].parameters(), "lr": 0.0},
        {"params": model[2].parameters(), "lr": 0.1},
    ]
    optimizer = FirstOrder(model, nn.CrossEntropyLoss(), torch.optim.SGD, params=groups, lr=1.0)
    assert optimizer.step(classes()).status.moved
    same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    assert same == [True, True, False, False]


def test_a_call_with_zero_gradients_creates_the_state_and_changes_nothing() -> None:
    # So torch.distributed.checkpoint makes a place to load into.
    model = net()
    before = parameters_of(model)
    optimizer = FirstOrder(model, nn.CrossEntropyLoss(), torch.optim.AdamW, lr=0.1)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert optimizer.step(closure=None) is None
    assert torch.equal(parameters_of(model), before)
    assert all("exp_avg" in optimizer.state[p] for p in model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.1
