"""First-order training in its fastest form, against torch's optimisers one step at a time."""

import math
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.environment import version_of
from benchmarks.target import cells, measuring
from benchmarks.target.methods import METHODS
from benchmarks.target.mini_batches import POINTS, MiniBatches
from benchmarks.target.updates import MOMENTUM, Update, make_update
from krylov_descent.laboratory.problems.problem import Problem
from tests.laboratory.tiny import tiny_problem

RATE, DECAY, BATCH = 0.01, 1e-3, 8
FIRST_ORDER = [name for name, method in METHODS.items() if method.rates and not method.tf32]


def trained(
    method: str, problem: Problem, *, recorded: bool, epochs: int = 3, scale: float = 1.0
) -> nn.Module:
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


def test_a_step_lasts_its_part_of_the_budget_and_the_rate_falls() -> None:
    problem = tiny_problem()
    model = problem.make_model(0)
    update = make_update("adam", model, DECAY, recorded=False)
    training = MiniBatches(
        model,
        problem.loss,
        update,
        batch_size=BATCH,
        rate=RATE,
        seconds=1.2,
        seed=5,
        recorded=False,
    )
    results = [training.step(problem.train) for _ in range(2)]
    assert all(result.total_seconds >= 1.2 / POINTS for result in results)
    assert results[0].passes >= 1
    spent = sum(result.total_seconds for result in results)
    assert 0 < float(update.rate) < RATE
    assert float(update.rate) >= RATE * (1 - spent / 1.2)


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
        seed=5,
        recorded=False,
    )
    result = training.step(problem.train)
    assert not result.status.moved
    assert result.passes == 1


@pytest.mark.parametrize("method", ["ksd", "adam"])
def test_a_cell_is_run(method: str) -> None:
    race = cells.Race(
        title="Tiny", problem="tiny", train=8.0, test=0.0, seconds=0.3, batch_size=BATCH
    )
    cell = cells.Cell(race="tiny", method=method, stage="seed", seed=1)
    rate = RATE if method == "adam" else None
    problem, measurements = tiny_problem(), 0

    def measured_slowly(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal measurements
        measurements += 1
        time.sleep(0.02)
        return problem.metric.per_sample(outputs, targets)

    slow = replace(problem, metric=replace(problem.metric, per_sample=measured_slowly))
    started = time.perf_counter()
    found = measuring.run(cell, race, slow, rate)
    wall = time.perf_counter() - started
    start = found["curve"][0][cells.KEYS.index("train")]
    assert found["last"]["train"] < start
    assert found["reached"]["test"] is None
    assert found["ending"] == "seconds"
    assert found["last"]["seconds"] >= 0.3
    assert found["rate"] == rate
    # Nobody's clock runs while errors are measured.
    assert measurements > 0
    assert found["last"]["seconds"] <= wall - 0.02 * measurements


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
