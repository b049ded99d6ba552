"""The run folder: what was asked for, what happened, and where to go on.

config.json       the full configuration, with versions and hardware
metrics.jsonl     one line per iteration
checkpoint.pt     everything needed to go on exactly
outcome.json      how it ended
lock              who writes here, while someone does

All of them but the checkpoint are JSON as its standard has it. That knows no numbers which are not
finite: they are the texts "NaN", "Infinity" and "-Infinity" there, and numbers again when read.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from krylov_descent.laboratory import folder_lock
from krylov_descent.laboratory.checkpoint import CheckpointError

Row = dict[str, Any]
# The ending of a run that is not over.
INTERRUPTED = "interrupted"


class RunFolderError(RuntimeError):
    """The run folder cannot be used as asked; the message says why and what to do."""


class RunFolder:
    """One run's files.

    Args:
        path: the folder; `begin` makes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoint(self) -> Path:
        """Where the checkpoint lies."""
        return self.path / "checkpoint.pt"

    @property
    def started(self) -> bool:
        """Whether there is a run here."""
        try:
            return (self.path / "config.json").exists()
        except OSError as problem:
            raise RunFolderError(
                f"the run folder {self.path} cannot be read: {problem.strerror}"
            ) from problem

    @property
    def finished(self) -> bool:
        """Whether the run has ended, other than by an interruption."""
        outcome = self.outcome()
        return outcome is not None and outcome["ending"] != INTERRUPTED

    def take(self) -> None:
        """Keep other processes from writing here until `release`, or the end of this process.

        Raises:
            RunFolderError: another process is at it, or the folder cannot be written.
        """
        try:
            with explained(f"the run folder {self.path} cannot be written"):
                folder_lock.take(self.path)
        except RunFolderError as problem:
            if isinstance(problem.__cause__, folder_lock.FolderInUseError):
                raise RunFolderError(
                    f"{self.path} is being written by {problem.__cause__}: wait for it, end it, or "
                    "choose another --folder"
                ) from problem
            raise

    def release(self) -> None:
        """Let other processes write here again."""
        folder_lock.release(self.path)

    def begin(self, config: dict[str, Any]) -> None:
        """Start a new run here.

        Raises:
            RunFolderError: there is a run already, or the folder cannot be written.
        """
        if self.started:
            raise RunFolderError(
                f"{self.path} holds a run already: go on with it by --resume {self.path}, or "
                "choose another --folder"
            )
        with explained(f"the run folder {self.path} cannot be written"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._metrics.write_text("")
            _write_json(self.path / "config.json", config)

    def go_on(self, config: dict[str, Any]) -> None:
        """Take note that the run goes on, with these limits."""
        with explained(f"the run folder {self.path} cannot be written"):
            _write_json(self.path / "config.json", config)
            (self.path / "outcome.json").unlink(missing_ok=True)

    def check_writable(self) -> None:
        """Refuse a folder that cannot be written, before the work whose results go there."""
        with explained(f"the run folder {self.path} cannot be written"):
            TemporaryFile(dir=self.path).close()

    def config(self) -> dict[str, Any]:
        """The configuration of the run."""
        if not self.started:
            raise RunFolderError(f"{self.path} is not a run folder: there is no config.json in it")
        return _read_json(self.path / "config.json")

    def append(self, row: Row) -> None:
        """Add one line of metrics."""
        with (
            explained(f"{self._metrics} cannot be written, the last checkpoint is intact"),
            self._metrics.open("a", encoding="utf-8") as file,
        ):
            file.write(strict_json(row) + "\n")

    def sync(self) -> None:
        """Wait until the metrics are on the disk, before a checkpoint that counts on them."""
        with self._metrics.open("rb+") as file:
            os.fsync(file.fileno())

    def rows(self) -> list[Row]:
        """All lines of metrics that are whole."""
        return list(self._whole_rows())

    def rewind(self, iteration: int) -> list[Row]:
        """Drop the lines after an iteration: what was done past the checkpoint is done again."""
        kept = [row for row in self._whole_rows() if row["iteration"] <= iteration]
        if len(kept) < iteration + 1:
            raise CheckpointError(
                f"{self._metrics} has {len(kept)} whole lines, and the checkpoint at iteration "
                f"{iteration} needs {iteration + 1}: the run folder is damaged, start again in "
                "another one"
            )
        with explained(f"{self._metrics} cannot be written"):
            partial = _beside(self._metrics)
            partial.write_text("".join(strict_json(row) + "\n" for row in kept), "utf-8")
            partial.replace(self._metrics)
        return kept

    def finish(self, outcome: dict[str, Any]) -> None:
        """Say how the run ended."""
        with explained(f"{self.path / 'outcome.json'} cannot be written"):
            _write_json(self.path / "outcome.json", outcome)

    def outcome(self) -> dict[str, Any] | None:
        """How the run ended; None while it has not."""
        path = self.path / "outcome.json"
        return _read_json(path) if self.started and path.exists() else None

    @property
    def _metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def _whole_rows(self) -> Iterator[Row]:
        if not self._metrics.exists():
            return
        for line in _text_of(self._metrics).splitlines():
            try:
                yield _with_numbers(json.loads(line))
            except json.JSONDecodeError:
                return  # the line a killed process was writing, and nothing comes after it


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Tell a failure of the file system as what cannot be done, and why."""
    try:
        yield
    except OSError as problem:
        raise RunFolderError(f"{what}: {problem.strerror}") from problem


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def strict_json(content: Any, indent: int | None = None) -> str:
    """JSON that every reader takes; a number that is not finite is a text."""
    return json.dumps(_with_texts(content), indent=indent, allow_nan=False)


def _with_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def _with_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_numbers(item) for item in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    partial = _beside(path)
    partial.write_text(strict_json(content, indent=2) + "\n", "utf-8")
    partial.replace(path)


def _read_json(path: Path) -> dict[str, Any]:
    text = _text_of(path)
    try:
        content = json.loads(text)
    except ValueError as problem:
        raise ValueError(f"{path} is damaged: it is not JSON ({problem})") from problem
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it is not a JSON object")
    found: dict[str, Any] = _with_numbers(content)
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"{path} is damaged: it is not a text in UTF-8 (byte {problem.start + 1})"
        ) from problem
