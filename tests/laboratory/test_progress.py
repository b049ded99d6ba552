import io
import re
from typing import Any

import pytest
from rich.console import Console

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems.problem import CLASSIFICATION_ERROR, SQUARED_ERROR, Metric
from krylov_descent.laboratory.progress import LiveLine
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
    title: str = "KSD on CURVES",
    terminal: bool = False,
) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80, height=25)
    with LiveLine(console, title, metric, limits or Limits()) as line:
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


def test_a_terminal_of_80_columns_holds_all_of_it() -> None:
    limits = Limits(seconds=36_000)
    text = shown(row(12_345, 4_000.0), limits=limits, title="Nonlinear CG on MN", terminal=True)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.strip() for line in plain.replace("\r", "\n").splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert "…" not in plain
    title, headings, values = lines[:3]
    assert title == "Nonlinear CG on MN"
    assert " ".join(headings.split()) == "iteration loss train validation rank evals time left"
    assert " ".join(values.split()) == "12345 123.457 16.9 17 21 27 1 h 06 min 8 h 53 min"
