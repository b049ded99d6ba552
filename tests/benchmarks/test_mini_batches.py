"""First-order training in its fastest form, against torch's optimisers one step at a time."""

import itertools
import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.environment import version_of
from benchmarks.target import cells, measuring
from benchmarks.target.choices import Choice
from benchmarks.target.methods import METHODS
from benchmarks.target.mini_batches import GROWTH, SHORTEST, MiniBatches
from benchmarks.target.updates import MOMENTUM, Update, make_update
from krylov_descent.laboratory.problems.problem import Problem
from tests.laboratory.tiny import tiny_problem

RATE, DECAY, BATCH = 0.01, 1e-3, 8
FIRST_ORDER = [name for name, method in METHODS.items() if method.rates and not method.tf32]


def trained(
    method: str, problem: Problem, *, recorded: bool, epochs: int = 3, scale: float = 1.0
) -> nn.Module:
    torch.manual_seed(0)  # PSGD-Kron draws by both
    np.random.seed(0)  # noqa: NPY002
    device = problem.train[0].device
    model = problem.make_model(0, None, device)
    update = make_update(method, model, DECAY, recorded=recorded)
    training = MiniBatches(
        model,
        problem.loss,
        update,
        batch_size=BATCH,
        rate=RATE,
        seconds=1.0,
        decay=1.0,
        seed=5,
        recorded=recorded,
    )
    for epoch in range(epochs):
        update.set_rate(scale * RATE / (1 + epoch))
        training.epoch(problem.train)
    return model


def by_hand(kind: Any, problem: Problem, **options: Any) -> nn.Module:
    model = problem.make_model(0)
    optimizer = kind(model.parameters(), lr=RATE, weight_decay=DECAY, **options)
    generator = torch.Generator().manual_seed(5)
    for epoch in range(3):
        optimizer.param_groups[0]["lr"] = RATE / (1 + epoch)
        for indices in torch.randperm(40, generator=generator).split(BATCH):
            x = problem.train[0][indices]
            optimizer.zero_grad()
            problem.loss(model(x), x).mean().backward()
            optimizer.step()
    return model


def assert_same(found: nn.Module, expected: nn.Module, tolerance: float = 1e-5) -> None:
    for a, b in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("method", "kind", "options"),
    [
        ("adam", torch.optim.Adam, {}),
        ("adamw", torch.optim.AdamW, {}),
        ("sgd", torch.optim.SGD, {"momentum": MOMENTUM, "nesterov": True}),
    ],
)
def test_it_is_what_torch_does(method: str, kind: Any, options: dict[str, Any]) -> None:
    problem = tiny_problem()
    assert_same(trained(method, problem, recorded=False), by_hand(kind, problem, **options))


def test_a_step_of_rate_1_that_is_shortened_is_the_step() -> None:
    models = [tiny_problem().make_model(0) for _ in range(2)]
    rates = (RATE, 0.5 * RATE, 0.0)
    options: dict[str, Any] = {"momentum": 0.9, "weight_decay": DECAY}
    plain = torch.optim.SGD(models[0].parameters(), lr=RATE, **options)
    inner = torch.optim.SGD(models[1].parameters(), lr=1.0, **options)
    update = Update([inner], list(models[1].parameters()), torch.zeros(()), "scaled")
    for rate in rates:
        for model in models:
            for p in model.parameters():
                p.grad = torch.sin(torch.arange(float(p.numel()))).reshape(p.shape)
        plain.param_groups[0]["lr"] = rate
        plain.step()
        update.set_rate(rate)
        update.step()
    assert_same(models[1], models[0], 1e-6)


def test_forgetting_is_starting_anew() -> None:
    model = tiny_problem().make_model(0)
    update = make_update("adam", model, DECAY, recorded=False)
    update.set_rate(RATE)
    start = [p.detach().clone() for p in model.parameters()]

    def move() -> list[torch.Tensor]:
        for p, value in zip(model.parameters(), start, strict=True):
            p.data.copy_(value)
            p.grad = torch.cos(torch.arange(float(p.numel()))).reshape(p.shape)
        update.step()
        return [p.detach().clone() for p in model.parameters()]

    first = move()
    assert any(not torch.equal(a, b) for a, b in zip(move(), first, strict=True))
    update.forget()
    assert all(torch.equal(a, b) for a, b in zip(move(), first, strict=True))


def test_muon_moves_matrices_and_adamw_the_rest() -> None:
    model = tiny_problem().make_model(0)
    update = make_update("muon", model, DECAY, recorded=False)
    dimensions = [
        {p.dim() for group in optimizer.param_groups for p in group["params"]}
        for optimizer in update.optimizers
    ]
    assert dimensions == [{2}, {1}]


@pytest.mark.parametrize("method", FIRST_ORDER)
def test_every_method_lowers_the_error_and_stands_still_at_rate_0(method: str) -> None:
    distribution = METHODS[method].distribution
    if distribution and version_of(distribution) is None:
        pytest.skip(f"{distribution} is not installed")
    problem = tiny_problem()
    start = problem.make_model(0)

    @torch.no_grad()
    def error(model: nn.Module) -> float:
        return float(problem.loss(model(problem.train[0]), problem.train[1]).mean())

    assert error(trained(method, problem, recorded=False, epochs=8)) < error(start)
    assert_same(trained(method, problem, recorded=False, scale=0.0), start, 0.0)


def test_a_method_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="'ksd'"):
        make_update("ksd", nn.Linear(2, 2), 0.0, recorded=False)


def mini_batches(
    seconds: float, decay: float | None, method: str = "adam"
) -> tuple[MiniBatches, Problem, Update]:
    problem = tiny_problem()
    model = problem.make_model(0)
    update = make_update(method, model, DECAY, recorded=False)
    training = MiniBatches(
        model,
        problem.loss,
        update,
        batch_size=BATCH,
        rate=RATE,
        seconds=seconds,
        decay=decay,
        seed=5,
        recorded=False,
    )
    return training, problem, update


class Clock:
    """Each mini-batch takes a hundredth of a second; nothing else takes any time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, training: MiniBatches) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(training, "_step", self.mini_batch)

    def mini_batch(self, data: Any) -> None:
        del data
        self.now += 0.01


def test_no_time_is_rounded_by_more_than_a_fiftieth(monkeypatch: pytest.MonkeyPatch) -> None:
    training, problem, _ = mini_batches(100.0, 100.0)
    clock = Clock(monkeypatch, training)
    times, passes = [0.0], 0.0
    while clock.now < 100.0 - 1e-9:
        passes += training.step(problem.train).passes
        times.append(clock.now)
    for before, after in itertools.pairwise(times):
        # A mini-batch is the least that there is, and half of one may be too much.
        assert after - before <= max(GROWTH * before, SHORTEST * 100.0) + 0.005 + 1e-9
    assert len(times) < 260
    assert clock.now == pytest.approx(100.0)
    assert passes == pytest.approx(10_000 / 5)  # five mini-batches are an epoch


def test_a_step_ends_within_an_epoch_and_the_next_goes_on_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, problem, _ = mini_batches(20.0, 20.0)
    clock = Clock(monkeypatch, training)
    seen: list[int] = []

    def mini_batch(data: Any) -> None:
        clock.mini_batch(data)
        seen.extend(training._indices.tolist())

    monkeypatch.setattr(training, "_step", mini_batch)
    results = [training.step(problem.train) for _ in range(10)]
    assert {result.passes for result in results} == {0.2}
    assert sorted(seen[:40]) == sorted(seen[40:]) == list(range(40))
    assert seen[:40] != seen[40:]


def test_the_rate_falls_to_0_over_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {}
    for decay in (1.0, 0.5, None):
        training, problem, update = mini_batches(1.0, decay)
        clock = Clock(monkeypatch, training)
        while clock.now < 0.5 - 1e-9:
            training.step(problem.train)
        training.step(problem.train)
        rates[decay] = float(update.rate)
    assert rates[1.0] == pytest.approx(0.5 * RATE, rel=0.05)
    assert rates[0.5] == 0.0
    assert rates[None] == pytest.approx(RATE)


def test_a_schedule_free_method_is_measured_at_its_average() -> None:
    if version_of("pytorch_optimizer") is None:
        pytest.skip("pytorch_optimizer is not installed")
    training, problem, update = mini_batches(0.2, None, "schedule-free")
    for _ in range(5):
        training.step(problem.train)
    (optimizer,) = update.optimizers
    measured = [p.detach().clone() for p in update.parameters]
    assert not optimizer.param_groups[0]["train_mode"]
    update.for_training()
    moved = [not torch.equal(p, m) for p, m in zip(update.parameters, measured, strict=True)]
    assert all(moved)
    update.for_evaluation()
    for p, m in zip(update.parameters, measured, strict=True):
        torch.testing.assert_close(p, m)


def test_a_loss_that_is_not_finite_ends_the_step() -> None:
    problem = tiny_problem()
    problem.train[0][0, 0] = math.nan
    model = problem.make_model(0)
    update = make_update("sgd", model, DECAY, recorded=False)
    training = MiniBatches(
        model,
        problem.loss,
        update,
        batch_size=40,
        rate=RATE,
        seconds=1e6,
        decay=1e6,
        seed=5,
        recorded=False,
    )
    result = training.step(problem.train)
    assert not result.status.moved
    assert result.passes == 1
    assert math.isnan(result.loss)


@pytest.mark.parametrize("method", ["ksd", "adam"])
def test_a_cell_is_run(method: str) -> None:
    race = cells.Race(
        title="Tiny", problem="tiny", train=8.0, test=0.0, seconds=0.3, batch_size=BATCH
    )
    cell = cells.Cell(race="tiny", method=method, stage="seed", seed=1)
    choice = Choice(RATE, 1.0) if method == "adam" else None
    problem, measurements = tiny_problem(), 0

    def measured_slowly(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal measurements
        measurements += 1
        time.sleep(0.02)
        return problem.metric.per_sample(outputs, targets)

    slow = replace(problem, metric=replace(problem.metric, per_sample=measured_slowly))
    started = time.perf_counter()
    found = measuring.run(cell, race, slow, choice)
    wall = time.perf_counter() - started
    start = found["curve"][0][cells.KEYS.index("train")]
    assert found["last"]["train"] < start
    assert found["reached"]["test"] is None
    assert found["ending"] == "seconds"
    assert found["last"]["seconds"] >= 0.3
    assert found["rate"] == (RATE if choice else None)
    assert found["passes_per_second"] == found["last"]["passes"] / found["last"]["seconds"]
    assert found["cpu_seconds_per_second"] > 0
    assert found["lowest_test"] <= found["last"]["test"]
    # Nobody's clock runs while errors are measured.
    assert measurements > 0
    assert found["last"]["seconds"] <= wall - 0.02 * measurements


def tiny_race(train: float) -> cells.Race:
    return cells.Race(
        title="Tiny", problem="tiny", train=train, test=0.0, seconds=0.4, batch_size=BATCH
    )


def test_a_run_ends_with_its_rate() -> None:
    cell = cells.Cell(race="tiny", method="adam", stage="seed", seed=1)
    found = measuring.run(cell, tiny_race(0.0), tiny_problem(), Choice(RATE, 0.25))
    assert found["seconds"] == 0.1
    assert 0.1 <= found["last"]["seconds"] < 0.3
    assert found["decay"] == 0.25


def test_a_try_ends_at_the_error_and_a_run_that_counts_goes_on() -> None:
    problem, choice = tiny_problem(), Choice(RATE, 1.0)
    tried = cells.Cell(race="tiny", method="adam", stage="decay", value=1.0)
    easy = tiny_race(1.25)  # at the start it is 1.254
    found = measuring.run(tried, easy, problem, choice)
    assert found["ending"] == "solved"
    assert found["last"]["seconds"] == found["reached"]["train"] < 0.4
    whole = cells.Cell(race="tiny", method="adam", stage="seed", seed=1)
    assert measuring.run(whole, easy, problem, choice)["ending"] == "seconds"


def test_a_try_ends_where_it_cannot_be_the_fastest() -> None:
    cell = cells.Cell(race="tiny", method="adam", stage="decay", value=1.0)
    found = measuring.run(cell, tiny_race(0.0), tiny_problem(), Choice(RATE, 1.0), to_beat=0.05)
    assert 0.05 <= found["last"]["seconds"] < 0.3
    assert found["reached"]["train"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("method", FIRST_ORDER)
def test_recorded_steps_are_the_steps(method: str) -> None:
    distribution = METHODS[method].distribution
    if distribution and version_of(distribution) is None:
        pytest.skip(f"{distribution} is not installed")
    problem = tiny_problem().to("cuda")
    # Muon rounds to bfloat16 on its way.
    tolerance = 2e-3 if method == "muon" else 1e-5
    assert_same(
        trained(method, problem, recorded=True),
        trained(method, problem, recorded=False),
        tolerance,
    )
