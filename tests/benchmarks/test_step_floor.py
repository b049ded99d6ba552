"""A KSD step against its floor, at a tiny size."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import rates, step, step_tables
from benchmarks.environment import UnavailableError, describe
from benchmarks.parts import Setting
from krylov_descent import Status, StepResult
from tests.laboratory.tiny import tiny_problem

CPU = torch.device("cpu")
CASE = step.Case(
    title="Tiny",
    problem="tiny",
    samples=40,
    subset=16,
    dimension=3,
    goal=1.3,
    goal_unit="floors",
)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rates.PEAK_SIZE, "cpu", 64)
        found = step.measure_case(CASE, tiny_problem(), 3)
    return {"environment": describe(CPU), **found}


def test_the_floor_is_operations_over_the_rate_of_a_plain_gradient(
    measured: dict[str, Any],
) -> None:
    products = measured["measured"]["products"]["median"]
    assert products == CASE.dimension + 1
    # 12-6-2 and its mirror image: p = (72, 12, 12, 72), Σ = 168.
    flops = {
        "gradient": 40 * 2 * (4 * 168 - 72),
        "basis": products * 16 * 2 * (4 * 168 - 2 * 72),
        "search": 20 * 16 * 2 * (3 * 168 - 72),
    }
    assert measured["flops"] == flops
    for phase in step.PHASES:
        rate = measured["rates"][phase]
        assert rate["batch"] == (40 if phase == "gradient" else 16)
        assert measured["floor"][phase] == pytest.approx(flops[phase] / rate["eager"])
        assert measured["at_peak"][phase] == pytest.approx(
            flops[phase] / measured["peaks"]["float32"]
        )


def test_the_phases_and_the_rest_make_up_the_step(measured: dict[str, Any]) -> None:
    assert len(measured["steps"]) == 3
    for found in measured["steps"]:
        assert sum(found["phases"].values()) + found["other"] == pytest.approx(found["seconds"])
        assert found["other"] >= 0


def steps_of(searches: list[tuple[int, float]]) -> list[dict[str, Any]]:
    """Accounts of steps with so many evaluations and seconds of searching."""
    found = []
    for evaluations, seconds in searches:
        result = StepResult(
            loss=1.0,
            loss_before=1.0,
            loss_after=0.5,
            status=Status.MOVED,
            reason="",
            evaluations=evaluations,
            products=4,
            seconds={"gradient": 1.0, "basis": 2.0, "search": seconds},
        )
        found.append(step.account(3.5 + seconds, result))
    return found


def test_what_a_search_takes_beside_its_evaluations_counts_once() -> None:
    # 5 s, and 0.1 s an evaluation
    found = step.summary(steps_of([(6, 5.6), (10, 6.0), (16, 6.6)]))
    assert found["evaluation"] == pytest.approx(0.1)
    assert found["search"]["median"] == pytest.approx(7.0)
    assert found["step"]["median"] == pytest.approx(10.5)
    assert found["other"]["median"] == pytest.approx(0.5)


def test_searches_that_hardly_differ_are_scaled_in_proportion() -> None:
    found = step.summary(steps_of([(10, 3.0), (10, 3.0)]))
    assert found["search"]["median"] == pytest.approx(6.0)
    assert found["step"]["median"] == pytest.approx(9.5)


def test_an_option_that_ksd_does_not_have_is_named() -> None:
    case = replace(CASE, options={"no_such_option": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(step.CASES, "cpu", {"tiny": case})
        with pytest.raises(UnavailableError, match="KSD has no option no_such_option"):
            step.measure("tiny", Setting(device=CPU, repeats=1, folder=None))  # type: ignore[arg-type]


def test_the_tables_show_measured_floor_and_what_is_left(measured: dict[str, Any]) -> None:
    whole, floor = measured["measured"]["step"]["median"], sum(measured["floor"].values())
    sections = {"tiny": measured}
    summary = step_tables.summary_table(sections, CPU)
    assert f"| {whole / floor:.2f} |" in summary
    assert "1.3 × its floor" in summary
    phases = step_tables.phase_table(sections, CPU)
    assert f"| {1e3 * floor:.2f} | {1e3 * whole:.2f} | {1e3 * (whole - floor):.2f} |" in phases
    assert phases.count("**Tiny, K = 3") == 1
    settings = measured["settings"] | {"repeats": 5}
    mixed = sections | {"later": measured | {"settings": settings}}
    assert "median of 3 or 5 (lowest" in step_tables.summary_table(mixed, CPU)


@pytest.mark.gpu
def test_a_recorded_gradient_is_the_gradient_in_either_precision() -> None:
    device = torch.device("cuda")
    problem = tiny_problem().to(device)
    model = problem.make_model(0, None, device)
    before = torch.backends.cuda.matmul.fp32_precision
    precisions: tuple[rates.Precision, ...] = ("float32", "tf32")
    for precision in precisions:
        timer = rates.GradientTimer(
            model, problem.criterion, problem.train[0], precision, "float32"
        )
        timer.sample()
        found = timer.rate()
        assert found.captured is not None
        assert found.best == max(found.eager, found.captured) > 0
    assert torch.backends.cuda.matmul.fp32_precision == before
