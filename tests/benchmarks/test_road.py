"""The problems of the road test are what they say, and its tables what was measured."""

from collections.abc import Callable
from math import inf, pi
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.environment import UnavailableError
from benchmarks.road import physics
from benchmarks.road.methods import DEFAULT, METHODS
from benchmarks.road.problem import Course, Task
from benchmarks.road.problems import COURSES, PROBLEMS
from benchmarks.road.running import names, order, run
from benchmarks.road.tables import demanding_table, median_time, profile, times
from krylov_descent import Objective

CPU = torch.device("cpu")
# Made of data that must be fetched.
FETCHED = {"mnist-autoencoder", "mnist-classifier", "convolutional"}


def task_of(name: str) -> Task:
    try:
        return PROBLEMS[name].make("cpu", 0)
    except UnavailableError as reason:
        pytest.skip(str(reason))


def test_there_are_as_many_as_promised() -> None:
    assert len(COURSES["cuda"]) >= 18
    assert len(COURSES["cpu"]) >= len(PROBLEMS) // 2
    assert set(COURSES["cpu"]) | set(COURSES["cuda"]) == set(PROBLEMS)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if name not in FETCHED])
def test_all_methods_have_the_same_loss(name: str) -> None:
    """What is measured, what first-order methods train, and what KSD trains."""
    task = task_of(name)
    objective = Objective(task.model, task.loss)
    value = objective.value_and_gradient((task.inputs, task.targets)).value
    assert task.value() == pytest.approx(value, rel=1e-4)
    repeated = PROBLEMS[name].make("cpu", 0)
    assert repeated.value() == task.value()


class Known(nn.Module):
    """A solution in place of a net."""

    def __init__(self, solution: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.solution = solution

    def forward(self, x: Tensor) -> Tensor:
        return self.solution(x).unsqueeze(1)


def convection(f: Tensor) -> Tensor:
    sine, cosine, t = f.unbind(1)
    return sine * torch.cos(physics.SPEED * t) - cosine * torch.sin(physics.SPEED * t)


def reaction(f: Tensor) -> Tensor:
    sine, cosine, t = f.unbind(1)
    angle = torch.atan2(sine, cosine)
    h = torch.exp(-8 * (torch.where(angle < 0, angle + 2 * pi, angle) - pi) ** 2 / pi**2)
    grown = h * torch.exp(physics.GROWTH * t)
    return grown / (grown + 1 - h)


def wave(f: Tensor) -> Tensor:
    x, t = pi * f.unbind(1)[0], pi * f.unbind(1)[1]
    return torch.sin(x) * torch.cos(2 * t) + torch.sin(4 * x) * torch.cos(8 * t) / 2


def poisson(f: Tensor) -> Tensor:
    return torch.sin(pi * f).prod(1)


@pytest.mark.parametrize("solution", [convection, reaction, wave, poisson])
def test_a_solution_leaves_no_residual(solution: Callable[[Tensor], Tensor]) -> None:
    task = PROBLEMS[solution.__name__].make("cpu", 0)
    assert task.value() > 1e-2
    task.model.net = Known(solution)
    # The hill of the reaction has a kink where the circle closes, of 1e-7.
    assert task.value() < 1e-12


def test_integrals_of_the_operator() -> None:
    task = PROBLEMS["deeponet"].make("cpu", 0)
    values, place = task.inputs[:, :-1].double(), task.inputs[:, -1].double()
    grid = torch.linspace(0, 1, values.shape[1], dtype=torch.float64)
    up_to = (grid[None] <= place[:, None]).double()
    rough = (values * up_to).mean(1)
    assert float((rough - task.targets[:, 0]).abs().max()) < 0.2
    assert float(torch.corrcoef(torch.stack([rough, task.targets[:, 0].double()]))[0, 1]) > 0.98


def test_a_run_ends_at_the_demanding_loss() -> None:
    course = Course(20.0, 1e-3, 1e-6)
    found = run(PROBLEMS["least-squares"], DEFAULT, {}, course, 0, CPU)
    assert 0 < found["reached"]["modest"] <= found["reached"]["demanding"] < 20
    assert found["loss"] <= 1e-6
    seconds = [point[0] for point in found["curve"]]
    assert seconds == sorted(seconds)


def test_a_run_ends_with_its_time() -> None:
    found = run(PROBLEMS["logistic"], "adam", {"rate": 1e-3}, Course(0.2, -1.0, -1.0), 0, CPU)
    assert found["reached"] == {"modest": None, "demanding": None}
    assert found["curve"][-1][0] >= 0.2


def test_an_error_of_a_setting_is_kept() -> None:
    course, setting = Course(1.0, 0.1, 0.1), {"dimension": -1}
    found = run(PROBLEMS["least-squares"], "ksd-grid", setting, course, 0, CPU)
    assert found["loss"] is None
    assert "dimension" in found["error"]


def section(*seconds: float | None, **more: Any) -> dict[str, Any]:
    runs = [{"reached": {"modest": s, "demanding": s}, "refused": 0, **more} for s in seconds]
    return {
        "environment": {
            "device": "a machine",
            "cpu": "a machine",
            "threads": 2,
            "date": "2026-11-18T00:00:00+00:00",
            "versions": {"torch": "2.13"},
        },
        "seconds": 4.0,
        "targets": {"modest": 1.0, "demanding": 0.1},
        "chosen": {"dimension": 30},
        "runs": runs,
    }


def test_the_best_setting_is_the_first_at_the_demanding_loss() -> None:
    def found(demanding: float | None, modest: float | None, loss: float | None) -> dict[str, Any]:
        return {"reached": {"modest": modest, "demanding": demanding}, "loss": loss}

    runs = [found(None, None, None), found(None, 1, 3), found(None, 1, 2), found(3, 2, 1)]
    assert sorted(runs, key=order) == runs[::-1]


def test_a_table_says_what_must_be_shown() -> None:
    sections = {
        "poisson.ksd": section(1.0, 2.0, None),
        "poisson.ksd-grid": section(1.0, 1.0, 1.0),
        "poisson.adam": section(None, None, 3.0),
        "wave.ksd": section(1.0, 1.0, 1.0, refused=5),
        "wave.ksd-grid": section(1.0, 1.0, 1.0),
        "wave.adam": section(0.5, 0.5, 0.5),
    }
    assert median_time(sections["poisson.adam"], "modest") == inf
    text = demanding_table(sections, CPU)
    assert "at most 1.25 on 1 of 2 problems that one of them solved, at most 2 on 2" in text
    assert "first on 1 of 2" in text
    assert "Of its 6 runs 3 had more than 3 refused" in text
    missing = " missing |" * 3
    assert f"| Poisson | 0.1 | 2.00 | 1.00 | – |{missing} KSD |" in text
    assert set(times(sections, "demanding")) == {"poisson", "wave"}


def test_a_profile_is_drawn(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    sections = {f"poisson.{method}": section(1.0, 2.0, 3.0) for method in METHODS}
    profile(sections, CPU, tmp_path / "profile.svg")
    assert "HF" in (tmp_path / "profile.svg").read_text()


def test_sections_of_a_device() -> None:
    on_cpu, on_gpu = names(CPU), names(torch.device("cuda"))
    assert len(on_gpu) == len(COURSES["cuda"]) * len(METHODS)
    only_gpu = sum(method.gpu_only for method in METHODS.values())
    assert len(on_cpu) == len(COURSES["cpu"]) * (len(METHODS) - only_gpu)
