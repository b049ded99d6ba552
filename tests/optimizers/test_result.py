"""What a step says about itself: StepResult, Status and the clock."""

import dataclasses
import pickle

import pytest
import torch
from torch import nn

from krylov_descent import KSD, Status, StepResult
from krylov_descent.optimizers.account import Stopwatch

N = 30
NOISE_EVALUATIONS = 4  # forward passes over C that measure the noise


def make_step(**settings: object) -> tuple[KSD, tuple[torch.Tensor, torch.Tensor]]:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = KSD(model, nn.MSELoss(), dimension=3, **settings)  # type: ignore[arg-type]
    return optimizer, (torch.randn(N, 4), torch.randn(N, 2))


def test_it_counts_what_the_step_cost() -> None:
    optimizer, data = make_step(subset_size=(10, 15))
    result = optimizer.step(data)
    assert result.status is Status.MOVED
    assert (result.samples, result.curvature_samples, result.objective_samples) == (N, 10, 15)
    assert result.rank == result.products == len(result.ritz_values) == 3
    assert 1 <= result.iterations < result.evaluations
    walked = N + result.products * 10 + (result.evaluations + NOISE_EVALUATIONS) * 15
    assert result.passes == pytest.approx(walked / N)
    assert optimizer.step(data).rank == 4  # the previous step has joined


def test_a_scaled_step_is_one_more_pass_over_c() -> None:
    optimizer, data = make_step(subset_size=(10, 15), lr=0.5)
    result = optimizer.step(data)
    walked = N + result.products * 10 + (result.evaluations + NOISE_EVALUATIONS + 1) * 15
    assert result.passes == pytest.approx(walked / N)


def test_norms_are_those_of_gradient_and_step() -> None:
    optimizer, data = make_step()
    model = optimizer.objective.network.model
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    gradients = torch.autograd.grad(nn.MSELoss()(model(data[0]), data[1]), list(model.parameters()))
    result = optimizer.step(data)
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    norm = float(torch.cat([g.reshape(-1) for g in gradients]).norm())
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)
    assert result.step_norm == pytest.approx(float((after - before).norm()), rel=1e-5)


def test_the_noise_is_that_of_the_arithmetic() -> None:
    torch.manual_seed(0)
    optimizer, (x, y) = make_step()
    single = optimizer.step((x, y)).noise
    model = optimizer.objective.network.model.double()
    double = KSD(model, nn.MSELoss(), dimension=3).step((x.double(), y.double())).noise
    assert 1e-10 < single < 1e-6
    assert 1e-19 < double < 1e-15


def test_seconds_are_booked_by_phase() -> None:
    optimizer, data = make_step()
    result = optimizer.step(data)
    assert set(result.seconds) == {"gradient", "basis", "search"}
    assert all(second > 0 for second in result.seconds.values())
    assert result.total_seconds == pytest.approx(sum(result.seconds.values()))


def test_the_stopwatch_adds_up_laps_of_a_phase() -> None:
    ticks = iter([0.0, 1.0, 3.0, 7.0])
    watch = Stopwatch(lambda: next(ticks))
    for phase in ("a", "b", "a"):
        watch.lap(phase)
    assert watch.seconds == {"a": 5.0, "b": 2.0}


# In words --------------------------------------------------------------------------------------


def test_it_prints_as_one_line() -> None:
    moved = StepResult(
        loss=0.412,
        loss_before=0.412,
        loss_after=0.377,
        status=Status.MOVED,
        reason="",
        rank=21,
        evaluations=27,
        products=21,
        samples=5,
        objective_samples=5,
        seconds={"gradient": 0.5, "search": 0.34},
    )
    expected = "loss 0.412 -> 0.377 | rank 21 | 27 evals | 21 products | 0.84 s"
    assert str(moved) == expected
    subset = dataclasses.replace(moved, objective_samples=3, loss=0.5)
    assert str(subset) == expected.replace("loss 0.412", "loss 0.5 | subset 0.412")


def test_a_refused_step_prints_why() -> None:
    stationary = StepResult(
        loss=0.25,
        loss_before=0.25,
        loss_after=0.25,
        status=Status.STATIONARY,
        reason=Status.STATIONARY.value,
    )
    assert str(stationary) == f"loss 0.25 | no step: {Status.STATIONARY.value} | 0.00 s"


def test_every_line_of_a_training_is_one_line() -> None:
    optimizer, (x, y) = make_step()
    results = [optimizer.step(data) for data in ((x, y), (x, y * torch.nan), (x, y))]
    assert [result.status.moved for result in results] == [True, False, True]
    assert not any("\n" in str(result) for result in results)
    assert "no step: the loss on A, all the data, is nan" in str(results[1])


@pytest.mark.parametrize("status", Status)
def test_a_status_is_a_sentence_and_knows_whether_it_moved(status: Status) -> None:
    assert len(status.value.split()) > 3
    assert status.moved == (status is Status.MOVED)
    assert ("the parameters are unchanged" in status.value) != status.moved


def test_a_result_is_a_value() -> None:
    optimizer, data = make_step()
    result = optimizer.step(data)
    assert pickle.loads(pickle.dumps(result)) == result
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.loss = 0.0  # type: ignore[misc]


def test_its_numbers_are_for_loggers() -> None:
    result = StepResult(
        loss=2.0,
        loss_before=2.0,
        loss_after=1.0,
        status=Status.MOVED,
        reason="",
        rank=3,
        ritz_values=(1.0, 2.0),
        terms={"wall": 0.5},
        seconds={"search": 0.1},
    )
    numbers = result.numbers()
    assert all(type(number) is float for number in numbers.values())
    assert (numbers["moved"], numbers["loss_after"], numbers["rank"]) == (1.0, 1.0, 3.0)
    assert (numbers["terms/wall"], numbers["seconds/search"]) == (0.5, 0.1)
    assert not numbers.keys() & {"status", "reason", "ritz_values", "damping", "terms"}
