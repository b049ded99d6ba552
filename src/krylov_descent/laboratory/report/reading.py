"""Reading a run's folder for the report, and telling a record that is not whole."""

from typing import Any

import torch

from krylov_descent.laboratory.checkpoint import CheckpointError, load_checkpoint
from krylov_descent.laboratory.record import Row, RunFolder, RunFolderError
from krylov_descent.laboratory.report.runs import Run, is_waiting


def read_run(folder: RunFolder) -> Run:
    """Read what a folder holds; a missing or damaged one gives a run that says so."""
    config: dict[str, Any] = {}
    try:
        config = folder.config()
        outcome = folder.outcome()
        # In this order: a run that is under way writes its lines before the checkpoint.
        reached, damaged = _recorded_iteration(folder, outcome)
        lines = _lines(folder)
        rows = folder.rows()
    except RunFolderError:
        missing = "missing: there is no run in this folder"
        return Run(folder=folder, config={}, rows=[], outcome=None, missing=missing)
    except (OSError, ValueError) as problem:
        damaged = f"its files cannot be read ({problem})"
        return Run(folder=folder, config=config, rows=[], outcome=None, damaged=damaged)
    damaged = damaged or _damage(lines, rows, reached)
    last = rows[-1]["iteration"] if rows else None
    if outcome is not None and outcome.get("last", {}).get("iteration") != last:
        outcome = None  # it was resumed after that, and has not ended again
    return Run(folder=folder, config=config, rows=rows, outcome=outcome, damaged=damaged)


def _recorded_iteration(
    folder: RunFolder, outcome: dict[str, Any] | None
) -> tuple[int | None, str]:
    """The iteration that the record must reach, by its end or its checkpoint, and what is damaged.

    The checkpoint is read only where the run would go on from it.
    """
    if not is_waiting(outcome):
        return (outcome or {}).get("last", {}).get("iteration"), ""
    if not folder.checkpoint.exists():
        return None, ""
    try:
        return int(load_checkpoint(folder.checkpoint, torch.device("cpu"))["iteration"]), ""
    except CheckpointError as problem:
        return None, str(problem)
    except KeyError:
        return None, f"the checkpoint {folder.checkpoint} does not hold a training state"


def _lines(folder: RunFolder) -> int | None:
    """How many lines of metrics there are, whole or not; None without the file."""
    path = folder.path / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else None


def _damage(lines: int | None, rows: list[Row], reached: int | None) -> str:
    """What is wrong with the metrics; the last line may be one that is just being written."""
    if lines is None:
        return "metrics.jsonl is missing"
    if len(rows) < lines - 1:
        return f"line {len(rows) + 1} of metrics.jsonl is broken"
    if reached is not None and len(rows) < reached + 1:
        return f"metrics.jsonl has {len(rows)} of {reached + 1} lines"
    return ""
