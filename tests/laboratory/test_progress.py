import io
import math
import re
import time
from typing import Any

import pytest
from rich.console import Console

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems.problem import CLASSIFICATION_ERROR, SQUARED_ERROR, Metric
from krylov_descent.laboratory.progress import LiveLine, Place, places
from krylov_descent.laboratory.rbm import PretrainingEpoch
from krylov_descent.optimizers.result import Status, StepResult

RESULT = StepResult(
    loss=123.456789,
    loss_before=1.0,
    loss_after=0.5,
    status=Status.MOVED,
    reason="",
    rank=21,
    evaluations=27,
)


def row(iteration: int, seconds: float, passes: float = 0.0, **more: Any) -> dict[str, Any]:
    errors = {"train": 16.91, "validation": 17.04, "test": 17.2}
    return {"iteration": iteration, "seconds": seconds, "passes": passes, **errors, **more}


def shown(
    *rows: dict[str, Any],
    limits: Limits | None = None,
    metric: Metric = SQUARED_ERROR,
) -> str:
    console = Console(file=io.StringIO(), width=80, height=25)
    with LiveLine(console, "KSD on CURVES", metric, limits or Limits()) as line:
        for each in rows:
            line.row(each, RESULT if each["iteration"] else None)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_log_has_the_first_row_and_the_last() -> None:
    assert shown(*(row(i, 2.0 * i) for i in range(50))).splitlines() == [
        "KSD on CURVES: iteration 0, train 16.9, validation 17, time 0 s",
        "KSD on CURVES: iteration 49, loss 123.457, train 16.9, validation 17, rank 21, evals 27, "
        "time 1 min 38 s",
    ]


def test_a_log_has_a_row_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LiveLine, "LOG_SECONDS", 0.0)
    lines = shown(*(row(i, 2.0 * i) for i in range(5))).splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"KSD on CURVES: iteration {i}" for i in range(5)
    ]


def test_what_there_is_not_is_not_shown() -> None:
    line = shown(row(0, 0.0, validation=None), metric=CLASSIFICATION_ERROR)
    assert line == "KSD on CURVES: iteration 0, train 1691.00%, time 0 s\n"


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (Limits(), None),
        (Limits(seconds=60), "40 s"),
        (Limits(iterations=40), "1 min 00 s"),  # 10 took 20 s, 30 are left
        (Limits(passes=500), "1 min 20 s"),  # 100 took 20 s, 400 are left
        (Limits(seconds=60, iterations=40, passes=500), "40 s"),
        (Limits(iterations=40_000), "22 h 13 min"),
        (Limits(seconds=10), "0 s"),
    ],
)
def test_the_time_left_is_to_the_nearest_limit(limits: Limits, left: str | None) -> None:
    line = shown(row(10, 20.0, passes=100.0), limits=limits).strip()
    assert line.endswith("time 20 s" if left is None else f"time 20 s, left {left}")


def test_pretraining_is_shown() -> None:
    console = Console(file=io.StringIO(), width=80)
    with LiveLine(console, "KSD", SQUARED_ERROR, Limits()) as line:
        line.pretraining(PretrainingEpoch(layer=1, layers=3, epoch=2, epochs=5, error=1.25))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().startswith("KSD: pretraining layer 1/3, epoch 2/5")


def screen(
    width: int,
    phase: str,
    *rows: dict[str, Any],
    limits: Limits | None = None,
    place: Place | None = None,
    compiles: bool = False,
) -> list[str]:
    """The lines of a terminal in the middle of a run."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=25)
    title = "Nonlinear CG on MNIST classification, pretrained, small"
    limits = limits or Limits(seconds=36_000)
    with LiveLine(console, title, SQUARED_ERROR, limits, place, compiles=compiles) as line:
        line.watch(lambda: phase)
        for each in rows:
            line.row(each, RESULT if each["iteration"] else None)
        file.truncate(0)
        file.seek(0)
        line._live.refresh()
        text = file.getvalue()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")
    return [" ".join(line.split()) for line in plain.splitlines() if line.strip()]


def test_a_terminal_of_80_columns_holds_all_of_it() -> None:
    title, doing, headings, values = screen(80, "search", row(12_345, 4_000.0))
    assert title == "Nonlinear CG on MNIST classification, pretrained, small"
    assert doing == "step 12346, search: 0 s"
    assert headings == "iteration loss train validation rank evals time left"
    assert values == "12345 123.457 16.9 17 21 27 1 h 06 min 8 h 53 min"


def test_a_narrow_terminal_keeps_the_optimiser_the_error_and_the_time_left() -> None:
    lines = screen(40, "search", row(12_345, 4_000.0), place=Place(number=2, count=5))
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("Nonlinear CG on MNIST")
    assert lines[1] == "run 2 of 5, step 12346, search: 0 s"
    assert {"iteration", "train", "left"} <= set(lines[2].split())
    assert "12345" in lines[3]


def test_there_is_something_to_see_before_the_first_iteration() -> None:
    assert screen(80, "preparing")[1] == "preparing: 0 s"
    assert screen(80, "step", row(0, 0.0), compiles=True)[1] == "step 1, compiling: 0 s"
    assert screen(80, "step", row(1, 1.0), compiles=True)[1] == "step 2: 0 s"


def test_the_clock_ticks_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = io.StringIO(), [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    console = Console(file=file, force_terminal=True, width=80, height=25)
    with LiveLine(console, "KSD", SQUARED_ERROR, Limits()) as line:
        assert "preparing: 0 s" in file.getvalue()
        now[0] += 61
        line._live.refresh()
        assert "preparing: 1 min 01 s" in file.getvalue()
        line.row(row(0, 0.0), None)
        file.truncate(0)
        file.seek(0)
    assert "iteration" in file.getvalue()
    assert "preparing" not in file.getvalue()


def test_the_time_that_all_runs_take() -> None:
    limits = [Limits(seconds=60), Limits(seconds=60), Limits(seconds=30)]
    first, second, last = places(limits)
    assert (first.number, first.count, first.seconds_after) == (1, 3, 90)
    assert second.seconds_after == 30
    *_, headings, values = screen(80, "basis", row(3, 20.0), limits=limits[0], place=first)
    assert headings.endswith("time left all runs")
    assert values.endswith("20 s 40 s 2 min 10 s")
    assert screen(80, "basis", row(3, 20.0), limits=limits[2], place=last)[2].endswith("time left")
    # Nobody knows how long a run without a limit takes.
    assert places([Limits(), Limits(seconds=1), Limits()])[0].seconds_after is None


def test_an_error_that_is_no_number_is_told() -> None:
    assert "train NaN" in shown(row(0, 0.0) | {"train": math.nan})
