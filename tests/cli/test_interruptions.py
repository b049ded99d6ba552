"""Runs that are killed, interrupted, or find no room or permission to write."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from krylov_descent.cli import main
from krylov_descent.laboratory.record import Row, RunFolder
from tests.cli.asking import Ksd
from tests.laboratory.example_runs import config, write_run
from tests.processes import start_ksd

# Small enough for a step to take a fraction of a second, large enough for a kill to hit it.
TINY = [
    "curves",
    "--small",
    *("--problem-set", "train=60"),
    *("--problem-set", "validation=20"),
    *("--problem-set", "test=20"),
]
OPTIMIZERS = {
    "ksd": ["dimension=4", "bfgs_iterations=5"],
    "hf": ["cg_iterations=12", "chunk_size=20"],
    "adam": ["batch_size=4"],
    "lbfgs": ["iterations=4"],
    "ncg": ["iterations=3"],
}
STEPS = 6
ENDLESS = 100_000  # steps of a run that will not have ended when the test gets round to it
NOT_COMPARED = ("seconds", "cpu_seconds", "phases")
WAIT = 300.0  # a busy machine may take a minute to import torch


def training(optimizer: str, folder: Path, *more: str, steps: int = STEPS) -> list[str]:
    options = [word for option in OPTIMIZERS[optimizer] for word in ("--set", option)]
    limits = ["--iterations", str(steps), "--folder", str(folder)]
    return ["train", *TINY, "--optimizer", optimizer, *options, *limits, *more]


def resuming(folder: Path, *more: str, steps: int) -> list[str]:
    return ["train", "--resume", str(folder), "--iterations", str(steps), *more]


def numbers(folder: Path) -> list[Row]:
    """All that is recorded of a run but the time it took."""
    rows = RunFolder(folder).rows()
    return [{k: v for k, v in row.items() if k not in NOT_COMPARED} for row in rows]


def assert_same_end(folder: Path, reference: Path) -> None:
    """The same metrics, parameters, best parameters and optimiser state, bit by bit."""
    assert numbers(folder) == numbers(reference)
    assert RunFolder(folder).finished
    ours, theirs = (flat(torch.load(f / "checkpoint.pt")) for f in (folder, reference))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        other = theirs[name]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, name


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts and lists as one dict."""
    if isinstance(state, dict):
        items = list(state.items())
    elif isinstance(state, list | tuple):
        items = list(enumerate(state))
    else:
        return {name: state}
    return {k: v for key, item in items for k, v in flat(item, f"{name}.{key}").items()}


def wait_for(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < ends, f"nothing happened for {WAIT:.0f} s"
        time.sleep(0.002)


def rows_in(folder: Path) -> int:
    """Lines of metrics that are whole; -1 before there is the file."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else -1


def has_rows(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: rows_in(folder) >= count


Undisturbed = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The folder of a run that nothing happened to, made when it is first asked for."""
    base = tmp_path_factory.mktemp("undisturbed")

    def made(optimizer: str, steps: int) -> Path:
        folder = base / f"{optimizer} {steps}"
        if not folder.exists():
            words = training(optimizer, folder, steps=steps)
            assert finish(start_ksd(*words, log=base / "log")) == 0, (base / "log").read_text()
            assert rows_in(folder) == steps + 1
        return folder

    return made


def finish(process: Any) -> int:
    process.join(WAIT)
    assert process.exitcode is not None, f"still running after {WAIT:.0f} s"
    return int(process.exitcode)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_killed_at_random_moments_and_resumed_it_gives_the_same_numbers(
    tmp_path: Path, undisturbed: Undisturbed, optimizer: str
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    always = ("--checkpoint-seconds", "0")
    begin = training(optimizer, folder, *always, steps=ENDLESS)
    pace = RunFolder(undisturbed(optimizer, STEPS)).rows()[-1]["seconds"] / STEPS
    # First before there is a checkpoint, as it may be, then later; with a checkpoint after each
    # step, some of the kills meet one that is being written.
    for more in (1, 1, 2, 2):
        again = resuming(folder, *always, steps=ENDLESS)
        known = rows_in(folder)
        process = start_ksd(*(again if RunFolder(folder).started else begin), log=log)
        wait_for(has_rows(folder, known + more))
        time.sleep(random.uniform(0, 1.5 * pace))
        process.kill()
        assert finish(process) == -signal.SIGKILL, log.read_text()
    steps = rows_in(folder) + 2
    assert finish(start_ksd(*resuming(folder, *always, steps=steps), log=log)) == 0
    assert_same_end(folder, undisturbed(optimizer, steps))


def test_what_was_done_after_the_last_checkpoint_is_done_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start_ksd(*training("ksd", folder, steps=ENDLESS), log=log)
    wait_for(has_rows(folder, 4))
    process.kill()
    assert finish(process) == -signal.SIGKILL
    assert torch.load(folder / "checkpoint.pt")["iteration"] == 0  # the next is due in 30 seconds
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "seco')  # a line cut short
    assert finish(start_ksd(*resuming(folder, steps=STEPS), log=log)) == 0
    assert_same_end(folder, undisturbed("ksd", STEPS))


def test_killed_in_the_middle_of_writing_a_checkpoint_it_goes_on_from_the_one_before(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    words = training("lbfgs", folder, "--checkpoint-seconds", "0")
    process = start_ksd(*words, log=log, before=die_in_large_files)
    assert finish(process) == -signal.SIGXFSZ, log.read_text()
    assert (folder / "checkpoint.pt.partial").stat().st_size == ROOM
    kept = torch.load(folder / "checkpoint.pt")["iteration"]
    assert 0 <= kept < RunFolder(folder).rows()[-1]["iteration"]
    assert finish(start_ksd("train", "--resume", str(folder), log=log)) == 0
    assert_same_end(folder, undisturbed("lbfgs", STEPS))


def test_a_full_disk_keeps_the_checkpoint_before_and_says_so(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    words = training("lbfgs", folder, "--checkpoint-seconds", "0")
    assert finish(start_ksd(*words, log=log, before=no_large_files)) == 1
    last = log.read_text().strip().splitlines()[-1]
    assert last == (
        f"ksd: the checkpoint {folder / 'checkpoint.pt'} could not be written (File too large); "
        "the one before is intact"
    )
    assert sorted(os.listdir(folder)) == ["checkpoint.pt", "config.json", "metrics.jsonl"]
    assert finish(start_ksd("train", "--resume", str(folder), log=log)) == 0
    assert_same_end(folder, undisturbed("lbfgs", STEPS))


ROOM = 2_500_000  # bytes: more than the first checkpoint of L-BFGS, less than a later one


def no_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))


def die_in_large_files() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    no_large_files()


def test_the_real_command_killed_and_interrupted_goes_on(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    folder = tmp_path / "a run"
    with ksd(*training("ksd", folder, steps=ENDLESS)) as process:
        wait_for(has_rows(folder, 2))
    assert process.returncode == -signal.SIGKILL

    known = rows_in(folder)
    with ksd("train", "--resume", str(folder)) as process:
        wait_for(has_rows(folder, known + 1))
        process.send_signal(signal.SIGINT)
        output, complaints = process.communicate(timeout=WAIT)
    assert process.returncode == 130, complaints
    assert "Ending after this iteration; Ctrl-C again ends it at once." in complaints
    done = RunFolder(folder).rows()[-1]["iteration"]
    assert known <= done
    assert output.endswith(
        f"Interrupted and saved at iteration {done}.\nTo go on: ksd train --resume '{folder}'\n"
    )
    assert torch.load(folder / "checkpoint.pt")["iteration"] == done
    assert not RunFolder(folder).finished

    log = tmp_path / "log"
    assert finish(start_ksd(*resuming(folder, steps=done + 2), log=log)) == 0, log.read_text()
    assert_same_end(folder, undisturbed("ksd", done + 2))


@contextmanager
def ksd(*words: str) -> Iterator["subprocess.Popen[str]"]:
    """The command as it is installed, killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "krylov_descent", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("module", ["commands", "exhibits"])
def test_ctrl_c_during_the_imports_has_no_traceback(module: str) -> None:
    program = f"""
import runpy, sys
class Impatient:
    def find_spec(self, name, *_):
        if name == "krylov_descent.cli.{module}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Impatient())
sys.argv = ["ksd", "reproduce", "table2"]
runpy.run_module("krylov_descent", run_name="__main__")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("library", ["typer", "scipy"])
def test_without_its_libraries_the_command_says_what_to_install(library: str) -> None:
    program = f"""
import runpy, sys
class Missing:
    def find_spec(self, name, *_):
        if name == "{library}":
            raise ModuleNotFoundError("No module named '{library}'", name=name)
sys.meta_path.insert(0, Missing())
sys.argv = ["ksd", "problems"]
runpy.run_module("krylov_descent", run_name="__main__")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 1
    sentence = f'ksd: {library} is not installed: pip install "krylov-descent[lab]"'
    assert " ".join(ended.stderr.split()) == sentence


def test_a_second_interruption_ends_it_at_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    slow = ["train", "curves", "--small", "--set", "dimension=2000", "--folder", str(folder)]
    process = start_ksd(*slow, log=log)
    wait_for((folder / "checkpoint.pt").exists)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    wait_for(lambda: "Ctrl-C again" in log.read_text())
    # Python drops an exception that a signal raises inside a finaliser: then one presses again.
    while process.is_alive():
        os.kill(process.pid, signal.SIGINT)
        process.join(3)
    assert finish(process) == 130
    assert len(numbers(folder)) == 1
    assert "Ended at once; what the last checkpoint holds is saved." in log.read_text()
    assert f"To go on: ksd train --resume {folder}" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_a_run_like_ctrl_c(tmp_path: Path, number: int) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start_ksd(*training("ksd", folder, steps=ENDLESS), log=log)
    wait_for(has_rows(folder, 2))
    assert process.pid is not None
    os.kill(process.pid, number)
    assert finish(process) == 130
    assert "Interrupted and saved at iteration" in log.read_text()
    done = RunFolder(folder).rows()[-1]["iteration"]
    assert torch.load(folder / "checkpoint.pt")["iteration"] == done


def test_a_run_that_is_under_way_is_left_alone(tmp_path: Path, ksd: Ksd) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    process = start_ksd(*training("ksd", folder, steps=ENDLESS), log=log)
    wait_for(has_rows(folder, 2))
    sentence = ksd("train", "--resume", str(folder)).sentence
    assert f"{folder} is being written by process {process.pid} on " in sentence
    assert sentence.endswith("wait for it, end it, or choose another --folder")
    process.kill()
    process.join()
    rows = RunFolder(folder).rows()
    assert [row["iteration"] for row in rows] == list(range(len(rows)))
    # The lock of a process that was killed is nobody's.
    steps = len(rows) + 1
    assert finish(start_ksd(*resuming(folder, steps=steps), log=log)) == 0, log.read_text()
    assert not (folder / "lock").exists()


def test_an_interrupted_comparison_goes_on_by_the_same_command(tmp_path: Path) -> None:
    base, log = tmp_path / "runs", tmp_path / "log"
    words = ["compare", *TINY, "--optimizers", "adam,sgd", "--seconds", "1", "--folder", str(base)]
    process = start_ksd(*words, log=log)
    wait_for(has_rows(base / "sgd", 2))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    assert finish(process) == 130
    assert "To go on: the same command" in log.read_text()
    first, second = numbers(base / "adam"), numbers(base / "sgd")
    log.unlink()
    assert finish(start_ksd(*words, log=log)) == 0, log.read_text()
    assert "Adam: there already" in log.read_text()
    assert numbers(base / "adam") == first
    assert len(numbers(base / "sgd")) > len(second)
    assert numbers(base / "sgd")[: len(second)] == second
    assert json.loads((base / "sgd" / "outcome.json").read_text())["ending"] == "seconds"
    assert (base / "report.html").stat().st_size > 10_000


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that nobody but root can write to."""
    folder = Path(tempfile.mkdtemp())  # not in tmp_path, which others cannot even look into
    folder.chmod(0o555)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


def become_nobody(words: list[str]) -> None:
    """Root, whom no permission stops, becomes someone else.

    Modules may lie where that one cannot read: the same command once before loads them all.
    """
    if os.getuid() == 0:
        with suppress(SystemExit):
            main(words)
        os.setgroups([])
        os.setuid(65534)


@pytest.mark.parametrize(("mode", "verb"), [(0o555, "written"), (0o000, "read")])
def test_no_permission_is_one_sentence(locked: Path, tmp_path: Path, mode: int, verb: str) -> None:
    locked.chmod(mode)
    folder, log = locked / "run", tmp_path / "log"
    before = partial(become_nobody, training("adam", tmp_path / "as root"))
    words = training("adam", folder)
    assert finish(start_ksd(*words, log=log, before=before)) == 1
    last = log.read_text().strip().splitlines()[-1]
    assert last == f"ksd: the run folder {folder} cannot be {verb}: Permission denied"
    locked.chmod(0o755)
    assert os.listdir(locked) == []


def test_words_in_a_folder_that_cannot_be_written_are_refused_at_once(
    locked: Path, tmp_path: Path
) -> None:
    locked.chmod(0o755)
    speech = {"name": "speech", "title": "Speech", "options": {}}
    write_run(locked, config(problem=speech) | {"initialization": "", "device": "", "limits": {}})
    locked.chmod(0o555)
    log = tmp_path / "log"
    before = partial(become_nobody, ["words", str(tmp_path)])
    assert finish(start_ksd("words", str(locked), log=log, before=before)) == 1
    last = log.read_text().strip().splitlines()[-1]
    assert last == f"ksd: the run folder {locked} cannot be written: Permission denied"
