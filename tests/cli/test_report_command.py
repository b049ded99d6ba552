from pathlib import Path
from typing import Any

import pytest

from krylov_descent.cli import reporting
from tests.cli.asking import ADAM, Ksd
from tests.laboratory.example_runs import AUTOENCODER, CLASSIFIER, config, write_run


def recorded(problem: dict[str, Any]) -> dict[str, Any]:
    """A configuration that is whole."""
    return config(problem=problem) | {"initialization": "sparse", "device": "cpu", "limits": {}}


def test_data_are_loaded_for_autoencoders_with_a_checkpoint_only(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(Path("runs/recorded"), recorded(AUTOENCODER))
    write_run(Path("runs/classifier"), recorded(CLASSIFIER)).checkpoint.touch()
    write_run(Path("runs/damaged")).checkpoint.touch()
    Path("runs/damaged/config.json").write_text("{")
    monkeypatch.setattr(reporting, "load", lambda *_: pytest.fail("data are not needed"))
    answer = ksd("report", "runs")
    assert answer.code == 0
    assert answer.err.startswith("The run in runs/damaged is damaged: its files cannot be read (")
    assert answer.err.count("\n") == 1


def test_forms_of_one_problem_that_fail_alike_are_said_once(ksd: Ksd) -> None:
    for code_size in (5, 6):
        options = {"code_size": code_size, "original": True}
        folder = write_run(Path(f"runs/{code_size}"), recorded(AUTOENCODER | {"options": options}))
        folder.checkpoint.touch()
    answer = ksd("report", "runs", "--data", ".")
    assert answer.code == 0
    assert answer.err.count("No pictures for curves: ") == 1


def test_a_damaged_record_is_said_on_the_page_and_the_console(ksd: Ksd) -> None:
    assert ksd(*ADAM, "--iterations", "2", "--folder", "run").code == 0
    Path("run/outcome.json").unlink()
    Path("run/metrics.jsonl").write_text("")
    refused = ksd("train", "--resume", "run").sentence
    assert "has 0 whole lines, and the checkpoint at iteration 2 needs 3" in refused
    answer = ksd("report", "run")
    assert (answer.code, answer.out) == (0, "Report: report.html\n")
    assert "The run in run is damaged: metrics.jsonl has 0 of 3 lines\n" in answer.err
    page = Path("report.html").read_text()
    assert "damaged: metrics.jsonl has 0 of 3 lines" in page
    assert "--resume" not in page
