"""A basis that is launched before anything is known of the gradient changes nothing else.

Here that is done on a CPU, as if there were a recording; `test_launched_ahead` has it on a GPU.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, KroneckerFactors
from krylov_descent.optimizers.ksd.ksd import _Step
from krylov_descent.optimizers.result import Status, StepResult

PRECONDITIONERS = ["fisher-diagonal", "identity", "kronecker"]


def step_each(preconditioner: str, sets: list[Any]) -> tuple[list[StepResult], Tensor]:
    """The results, less their times, and the parameters at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    chosen = KroneckerFactors(after=1) if preconditioner == "kronecker" else preconditioner
    optimizer = KSD(model, nn.MSELoss(), dimension=4, preconditioner=chosen, weight_decay=1e-3)
    results = [replace(optimizer.step(data), seconds={}) for data in sets]
    return results, torch.cat([p.detach().flatten() for p in model.parameters()])


def data(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 2, generator=generator)


def recorded(monkeypatch: pytest.MonkeyPatch, answers: Iterator[bool]) -> list[str]:
    """Have a recording of the basis, if so answered each time; what is done in which order."""
    order: list[str] = []
    basis, numbers = _Step.basis, _Step.numbers

    def noted_basis(*args: Any) -> Any:
        order.append("basis")
        return basis(*args)

    def noted_numbers(*args: Any) -> Any:
        order.append("numbers")
        return numbers(*args)

    monkeypatch.setattr(_Step, "basis", noted_basis)
    monkeypatch.setattr(_Step, "numbers", noted_numbers)
    monkeypatch.setattr(_Step, "basis_is_recorded", property(lambda step: next(answers)))
    return order


def always() -> Iterator[bool]:
    while True:
        yield True


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_steps_are_the_same(monkeypatch: pytest.MonkeyPatch, preconditioner: str) -> None:
    expected, end = step_each(preconditioner, [data()] * 3)
    order = recorded(monkeypatch, always())
    found, ahead_end = step_each(preconditioner, [data()] * 3)
    assert order == ["basis", "numbers"] * 3
    assert found == expected
    assert torch.equal(ahead_end, end)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e30])
def test_refusals_are_the_same(
    monkeypatch: pytest.MonkeyPatch, preconditioner: str, factor: float
) -> None:
    inputs, targets = data()
    sets = [data(), (inputs, factor * targets)]
    (_, expected), end = step_each(preconditioner, sets)
    recorded(monkeypatch, always())
    (_, found), ahead_end = step_each(preconditioner, sets)
    assert found.status is Status.NOT_FINITE
    assert repr(found) == repr(expected)  # NaN equals nothing
    assert torch.equal(ahead_end, end)


def test_a_gradient_of_zero_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = data()
    optimizer = KSD(nn.Linear(4, 2), nn.MSELoss())
    with torch.no_grad():
        for p in optimizer.objective.parameters.tensors:
            p.zero_()
    order = recorded(monkeypatch, always())
    result = optimizer.step((inputs, torch.zeros(60, 2)))
    assert order == ["basis", "numbers"]
    assert (result.status, result.rank, result.products) == (Status.STATIONARY, 0, 0)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_what_was_forgotten_meanwhile_is_done_again(
    monkeypatch: pytest.MonkeyPatch, preconditioner: str
) -> None:
    expected, end = step_each(preconditioner, [data()])
    # Asked at the start, before the launch and after it; and at the start again.
    order = recorded(monkeypatch, iter([True, True, False, False]))
    found, again_end = step_each(preconditioner, [data()])
    assert order == ["basis", "numbers", "numbers", "basis"]
    assert found == expected
    assert torch.equal(again_end, end)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_what_was_forgotten_with_the_gradient_is_not_launched(
    monkeypatch: pytest.MonkeyPatch, preconditioner: str
) -> None:
    expected, end = step_each(preconditioner, [data()])
    order = recorded(monkeypatch, iter([True, False, False, False]))
    found, again_end = step_each(preconditioner, [data()])
    assert order == ["numbers", "numbers", "basis"]
    assert found == expected
    assert torch.equal(again_end, end)


def test_samples_that_may_not_come_again_are_not_gone_ahead_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order = recorded(monkeypatch, always())
    optimizer = KSD(nn.Linear(4, 2), nn.MSELoss())
    optimizer.step([data()])
    optimizer.step(data(), curvature_data=iter([data()]))
    assert order == ["numbers", "basis"] * 2
