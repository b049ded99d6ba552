"""Runs in the report that are unfinished, missing or damaged."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from krylov_descent.laboratory.record import RunFolderError
from krylov_descent.laboratory.report import write_report
from tests.laboratory.example_runs import (
    rows,
    write_comparison,
    write_run,
)
from tests.laboratory.report_page import report


def test_unfinished_and_missing_runs_are_shown(tmp_path: Path) -> None:
    page = report(write_comparison(tmp_path), tmp_path)
    assert page.row("L-BFGS")[-1] == "unfinished, at iteration 47"
    assert page.row("ncg")[1:] == 10 * ["–"] + ["missing: there is no run in this folder"]
    assert [method["label"] for method in page.data[0]["methods"]][-1] == "L-BFGS"


def test_run_without_rows_and_damaged_run(tmp_path: Path) -> None:
    begun = write_run(tmp_path / "begun", metrics=[], ending=None)
    damaged = write_run(tmp_path / "damaged")
    (damaged.path / "config.json").write_text('{"problem": ')
    page = report([begun, damaged], tmp_path)
    assert "No run has a result yet." in page.text
    assert page.row("KSD")[-1] == "not started"
    assert page.row("damaged")[-1].startswith("damaged: its files cannot be read")


def test_run_resumed_after_its_end_is_unfinished(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "ksd")
    folder.append(rows(steps=130)[121])
    folder.checkpoint.touch()
    page = report([folder], tmp_path)
    assert page.row("KSD")[-1] == "unfinished, at iteration 121"
    assert page.commands[1] == f"ksd train --resume {folder.path}"


def test_unfinished_run_goes_on_from_a_good_checkpoint(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "ksd", ending=None)
    torch.save({"iteration": 120}, folder.checkpoint)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 12')  # it was killed while it wrote
    page = report([folder], tmp_path)
    assert page.row("KSD")[-1] == "unfinished, at iteration 120"
    assert page.commands[1] == f"ksd train --resume {folder.path}"


def lines_of(text: str, count: int) -> str:
    return "".join(text.splitlines(keepends=True)[:count])


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda text: "", "metrics.jsonl has 0 of 121 lines"),
        (lambda text: lines_of(text, 30), "metrics.jsonl has 30 of 121 lines"),
        (lambda text: text[:-20], "metrics.jsonl has 120 of 121 lines"),
        (lambda text: text.replace('"iteration": 7,', ","), "line 8 of metrics.jsonl is broken"),
        (lambda text: None, "metrics.jsonl is missing"),
    ],
)
def test_damaged_metrics_are_said_and_not_to_be_resumed(
    tmp_path: Path, ended: bool, spoil: Callable[[str], str | None], what: str
) -> None:
    folder = write_run(tmp_path / "ksd", ending="early_stop" if ended else None)
    torch.save({"iteration": 120}, folder.checkpoint)
    metrics = folder.path / "metrics.jsonl"
    spoilt = spoil(metrics.read_text())
    if spoilt is None:
        metrics.unlink()
    else:
        metrics.write_text(spoilt)
    page = report([folder], tmp_path)
    assert page.row("KSD")[-1].startswith(f"damaged: {what}")
    assert f"KSD: damaged: {what}" in page.text
    assert "--resume" not in "".join(page.commands)


@pytest.mark.parametrize(
    ("state", "what"),
    [(b"", "is damaged or not a checkpoint"), (None, "does not hold a training state")],
)
def test_unfinished_run_with_a_damaged_checkpoint(
    tmp_path: Path, state: bytes | None, what: str
) -> None:
    folder = write_run(tmp_path / "ksd", ending=None)
    if state is None:
        torch.save({}, folder.checkpoint)
    else:
        folder.checkpoint.write_bytes(state)
    page = report([folder], tmp_path)
    assert page.row("KSD")[-1].startswith(f"damaged: the checkpoint {folder.checkpoint} {what}")
    assert "--resume" not in "".join(page.commands)


def test_what_the_outcome_notes_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "ksd")
    outcome = folder.outcome()
    assert outcome is not None
    folder.finish(outcome | {"note": "The machine was busy"})
    assert '<p class="caveats">KSD: The machine was busy.</p>' in report([folder], tmp_path).text


def test_a_page_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    folder, path = write_run(tmp_path / "ksd"), tmp_path / "out" / "report.html"
    write_report([folder], path)
    with path.open() as reader:
        before = path.read_text()
        write_report([folder], path, target=0.5)
        assert reader.read() == before != path.read_text()
    path.unlink()
    path.mkdir()
    with pytest.raises(RunFolderError, match="cannot be written: Is a directory"):
        write_report([folder], path)
    assert list(path.parent.iterdir()) == [path]
