"""Runs of the laboratory on several ranks, killed and started anew by torchrun."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from krylov_descent.cli import main
from krylov_descent.laboratory.record import RunFolder
from tests.distributed import killed_once, on_two_disks, page, work
from tests.distributed.group import Group
from tests.processes import start

STEPS = 5
NOT_COMPARED = ("seconds", "cpu_seconds", "phases")
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "processes.md"


def numbers(folder: Path) -> list[dict[str, Any]]:
    rows = RunFolder(folder).rows()
    return [{k: v for k, v in row.items() if k not in NOT_COMPARED} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(pair: Group, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on two ranks that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    first, second = pair.run(work.train, folder, STEPS)
    assert first == second  # metrics are those of all data, on every rank
    return folder


def test_a_run_on_two_ranks_has_the_errors_of_one(undisturbed: Path, tmp_path: Path) -> None:
    work.train(tmp_path / "alone", STEPS)
    together, alone = numbers(undisturbed), numbers(tmp_path / "alone")
    assert len(together) == len(alone) == STEPS + 1
    for key in ("train", "validation", "test"):
        assert together[0][key] == pytest.approx(alone[0][key], rel=1e-6)
        # In float32 the searches may part, but not far.
        assert together[-1][key] == pytest.approx(alone[-1][key], rel=0.05)
    assert RunFolder(undisturbed).config()["ranks"] == 2
    assert sorted(os.listdir(undisturbed)) == sorted(os.listdir(tmp_path / "alone"))


def torchrun(
    *words: str, processes: int = 2, folder: Path = ROOT
) -> "subprocess.CompletedProcess[str]":
    """Start the processes in a folder, and once more if one of them fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(processes), *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_killed_in_the_middle_of_a_step_it_goes_on_and_ends_with_the_same_numbers(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    options = work.TRAINING["problem_options"]
    words = ["train", "curves", "--small", "--iterations", str(STEPS), "--folder", str(folder)]
    for key in ("train", "validation", "test"):
        words += ["--problem-set", f"{key}={options[key]}"]
    for key, value in work.TRAINING["optimizer_options"].items():
        words += ["--set", f"{key}={value}"]
    found = torchrun(str(killed_once.__file__), *words, "--checkpoint-seconds", "0")
    assert found.returncode == 0, found.stderr
    # The killed one, or rank 0, which ends because of it: whichever torchrun saw first.
    assert re.search(r"failed \(exitcode: -\d+\) local_rank: [01]", found.stderr)
    assert "ksd: rank 0 of 2: the all-reduce in phase 'search' failed" in found.stderr
    assert numbers(folder) == numbers(undisturbed)
    ours, theirs = (torch.load(path / "checkpoint.pt") for path in (folder, undisturbed))
    for name, tensor in ours["model"].items():
        assert torch.equal(tensor, theirs["model"][name])
    # It went on from a checkpoint, not from the start, and only rank 0 spoke.
    shown = [line for line in found.stdout.splitlines() if "iteration" in line]
    assert "iteration 0" in shown[0]
    assert sum("iteration 0" in line for line in shown) == 1
    assert found.stdout.count("Run folder:") == 1
    assert json.loads((folder / "outcome.json").read_text())["ending"] == "iterations"


def test_a_run_that_was_there_before_is_refused_after_a_restart_too(
    undisturbed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    # The settings of the run that is there, and so nothing but the guard can refuse it.
    command = shlex.split(RunFolder(folder).config()["command"])
    words = [*command[1 : command.index("--folder")], "--folder", str(folder)]
    found = torchrun("-m", "krylov_descent", *words, processes=1)
    assert found.returncode != 0
    assert found.stderr.count(f"{folder} holds a run already: go on with it by --resume") == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_run_goes_on_from_the_disk_of_rank_0(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copytree(undisturbed, tmp_path / "run")
    words = ["train", "--resume", "run", "--iterations", str(STEPS + 1)]
    found = torchrun(str(on_two_disks.__file__), *words, folder=tmp_path)
    assert found.returncode == 0, found.stderr
    rows = numbers(tmp_path / "run")
    assert rows[: STEPS + 1] == numbers(undisturbed)
    assert rows[-1]["iteration"] == STEPS + 1
    assert RunFolder(tmp_path / "run").config()["ranks"] == 2


def test_an_optimiser_that_does_not_sum_is_refused(pair: Group, tmp_path: Path) -> None:
    for good, told in pair.try_to_run(work.train, tmp_path / "run", 1, "adam"):
        assert not good
        assert "'adam' cannot be run on 2 ranks, as it does not sum over them" in told
    assert not (tmp_path / "run").exists()


def test_the_code_of_the_page_on_several_processes_runs_on_two(
    tmp_path: Path,
) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(page.run, PAGE, rank, port, log) for rank, log in enumerate(logs)]
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    assert logs[0].read_text().count("loss") == 3
    assert logs[1].read_text() == ""


def test_torchrun_is_for_training_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with pytest.raises(SystemExit) as ending:
        main(["problems"])
    assert ending.value.code == 1
    assert "torchrun is for `train`" in capsys.readouterr().err
