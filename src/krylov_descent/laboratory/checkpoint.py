"""Checkpoints that are either the old one or the new one, never half of either.

A checkpoint is written beside its place, flushed to the disk, and renamed over the old one,
which is atomic. A full disk or a killed process leaves the old one as it was.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which and why."""


def save_atomically(state: dict[str, Any], path: Path) -> None:
    """Write the state so that `path` holds either all of it or what it held before."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as problem:  # torch reports a full disk as a RuntimeError
        with suppress(OSError):
            partial.unlink()
        before = "the one before is intact" if path.exists() else "there is none before it"
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({_reason(problem)}); {before}"
        ) from problem


def load_checkpoint(path: Path, device: torch.device) -> dict[str, Any]:
    """Read a checkpoint, with nothing but tensors and plain values in it.

    Raises:
        CheckpointError: it is missing, damaged or not a checkpoint.
    """
    if not path.exists():
        raise CheckpointError(
            f"there is no checkpoint at {path}: there is nothing to resume from, start again in "
            "another folder"
        )
    try:
        _check_sums(path)
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as problem:  # what torch raises depends on where it stumbles
        raise CheckpointError(
            f"the checkpoint {path} is damaged or not a checkpoint ({type(problem).__name__}): "
            "put a good copy in its place, or start again in another folder"
        ) from problem
    if not isinstance(state, dict):
        raise CheckpointError(f"the checkpoint {path} does not hold a training state")
    return state


def _check_sums(path: Path) -> None:
    """Compare the checksums in the file with its bytes, which torch does not when it reads."""
    with ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise BadZipFile(f"{damaged} has another checksum")


def _reason(problem: BaseException) -> str:
    """What the system said; torch's own error only tells in which of its lines it was."""
    seen: BaseException | None = problem
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return str(problem)
