import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from krylov_descent.laboratory.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_atomically,
)
from tests.processes import start

CPU = torch.device("cpu")
LARGE = 1_000_000


def state(number: float) -> dict[str, Any]:
    return {"iteration": 3, "model": {"w": torch.full((LARGE // 4,), number)}, "best": {}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint.pt"
    save_atomically(state(1.0), path)
    return path


def assert_holds(path: Path, number: float) -> None:
    found = load_checkpoint(path, CPU)
    assert found["iteration"] == 3
    assert torch.equal(found["model"]["w"], torch.full((LARGE // 4,), number))


def test_what_is_saved_is_read_back_and_nothing_else_is_left(saved: Path) -> None:
    assert_holds(saved, 1.0)
    save_atomically(state(2.0), saved)
    assert_holds(saved, 2.0)
    assert os.listdir(saved.parent) == [saved.name]


def test_nothing_but_plain_values_is_read(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save({"model": Path("anything")}, path)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(path, CPU)


@pytest.mark.parametrize("kept", [0, 1, 10, 1000, LARGE // 2, -1])
def test_a_truncated_checkpoint_is_told(saved: Path, kept: int) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[:kept])
    with pytest.raises(CheckpointError, match=f"{saved} is damaged") as caught:
        load_checkpoint(saved, CPU)
    assert "start again in another folder" in str(caught.value)


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_two_wrong_bytes_are_told(saved: Path, where: float) -> None:
    content = bytearray(saved.read_bytes())
    at = int(where * len(content))
    content[at : at + 2] = bytes(byte ^ 0xFF for byte in content[at : at + 2])
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{saved} is damaged"):
        load_checkpoint(saved, CPU)


def test_a_missing_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*x\.pt"):
        load_checkpoint(tmp_path / "x.pt", CPU)


def test_something_else_in_its_place_is_told(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    torch.save([1, 2, 3], path)
    with pytest.raises(CheckpointError, match="does not hold a training state"):
        load_checkpoint(path, CPU)


@pytest.mark.parametrize("room", [0, 100, LARGE // 2])
def test_a_full_disk_leaves_the_old_one(saved: Path, room: int) -> None:
    with files_of_at_most(room), pytest.raises(CheckpointError) as caught:
        save_atomically(state(2.0), saved)
    assert "could not be written (File too large); the one before is intact" in str(caught.value)
    assert_holds(saved, 1.0)
    assert os.listdir(saved.parent) == [saved.name]


def test_a_full_disk_before_the_first_one(tmp_path: Path) -> None:
    with files_of_at_most(1000), pytest.raises(CheckpointError, match="there is none before it"):
        save_atomically(state(2.0), tmp_path / "checkpoint.pt")
    assert os.listdir(tmp_path) == []


def test_a_full_file_system_leaves_the_old_one(small_disk: Path) -> None:
    path = small_disk / "checkpoint.pt"
    save_atomically(state(1.0), path)
    with pytest.raises(CheckpointError, match=r"No space left on device\); the one before is inta"):
        save_atomically(state(2.0), path)
    assert_holds(path, 1.0)
    assert os.listdir(small_disk) == [path.name]


@pytest.mark.parametrize("written", [0, 100, LARGE // 2])
def test_a_process_killed_while_it_writes_leaves_the_old_one(saved: Path, written: int) -> None:
    process = start(save_and_die, saved, written)
    process.join()
    assert process.exitcode == -signal.SIGXFSZ
    assert saved.with_name("checkpoint.pt.partial").stat().st_size == written
    assert_holds(saved, 1.0)
    save_atomically(state(2.0), saved)
    assert_holds(saved, 2.0)
    assert os.listdir(saved.parent) == [saved.name]


def test_a_place_that_is_no_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        save_atomically(state(1.0), tmp_path / "file" / "checkpoint.pt")


class files_of_at_most:  # noqa: N801  (reads as a context)
    """No file may grow beyond so many bytes, as on a full disk."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def save_and_die(path: Path, written: int) -> None:
    """Python ignores the signal at a file's limit; its default is to end the process there."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (written, written))
    save_atomically(state(2.0), path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one and a half checkpoints."""
    size = f"size={LARGE * 3 // 2}"
    mount = ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(tmp_path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a small file system is not permitted here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)
