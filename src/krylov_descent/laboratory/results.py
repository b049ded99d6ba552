"""What the cells of an exhibit found: errors, time ratios, and all of it as one JSON file."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from krylov_descent.laboratory.limits import Ending
from krylov_descent.laboratory.record import Row, RunFolder, explained, strict_json
from krylov_descent.laboratory.repeats import estimate
from krylov_descent.laboratory.reproduce import DEFAULTS, HF, PAPER, Cell, Exhibit, by_line

# Endings that say nothing about how long the run would have taken.
CUT_SHORT = [e.name.lower() for e in (Ending.ITERATIONS, Ending.SECONDS, Ending.PASSES)]
# What times depend on beside the method.
MACHINE = ("torch", "cpu", "gpu", "cores", "threads")
CURVE_KEYS = ("iteration", "seconds", "passes", "train", "validation", "test")
CURVE_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """KSD's time over HF's, by two measures.

    Attributes:
        total: each to its own early stop; the paper's measure. None where a limit ended both.
        bound: "at most" where a limit ended HF, which would have taken longer; "at least" where
            it ended KSD; else "".
        to_worse: to the worse of the two final training errors, which both reached. None where
            HF began with it, and where an error is not a number.
    """

    total: float | None
    bound: Literal["", "at most", "at least"]
    to_worse: float | None


def time_ratio(ksd: RunFolder, hf: RunFolder) -> Ratio | None:
    """Both measures; None where one of the runs has not ended, or was made on another machine."""
    if not (ksd.finished and hf.finished) or _machine(ksd) != _machine(hf):
        return None
    cut = [(folder.outcome() or {})["ending"] in CUT_SHORT for folder in (ksd, hf)]
    ours, theirs = ksd.rows(), hf.rows()
    worse = max(ours[-1]["train"], theirs[-1]["train"])
    reached = [
        next((row["seconds"] for row in rows if row["train"] <= worse), None)
        for rows in (ours, theirs)
    ]
    return Ratio(
        total=None if all(cut) else ours[-1]["seconds"] / theirs[-1]["seconds"],
        bound="" if cut[0] == cut[1] else "at least" if cut[0] else "at most",
        to_worse=reached[0] / reached[1] if reached[0] is not None and reached[1] else None,
    )


def _machine(folder: RunFolder) -> list[Any]:
    """Records of earlier versions do not say; their times are compared with each other alone."""
    environment = folder.config().get("environment", {})
    return [environment.get(key) for key in MACHINE]


def ratio_of(cell: Cell, base: Path) -> Ratio | None:
    """The time ratio of a table's cell; None for HF itself, and where there is none yet."""
    if cell.column not in (PAPER, DEFAULTS):
        return None
    return time_ratio(cell.folder(base), replace(cell, column=HF).folder(base))


def summarize(exhibit: Exhibit, base: Path) -> Path:
    """Write what the cells found as one JSON file; unfinished ones as null. Returns its path.

    Raises:
        RunFolderError: it cannot be written.
    """
    cells = []
    for cell in exhibit.cells:
        folder = cell.folder(base)
        outcome = folder.outcome() if folder.finished else None
        found: dict[str, Any] = {"row": cell.row, "column": cell.column, "outcome": None}
        if cell.split is not None:
            found["split"] = cell.split
        elif cell.settings.seed:
            found["seed"] = cell.settings.seed
        if outcome is not None:
            config = folder.config()
            found |= {
                "outcome": {key: _short(value) for key, value in outcome.items()},
                "optimizer": config["optimizer"],
                "command": config["command"],
            }
            # Records of earlier versions have the second.
            found |= {key: config[key] for key in ("environment", "versions") if key in config}
            if not {"split", "seed"} & found.keys():  # all curves would be most of the file
                rows = _thinned(folder.rows())
                found["curve"] = [{key: row[key] for key in CURVE_KEYS} for row in rows]
            ratio = ratio_of(cell, base)
            if ratio is not None:
                found["time_ratio"] = asdict(ratio)
        cells.append(found)
    path = base / f"{exhibit.name}.json"
    content = {"title": exhibit.title, "cells": cells, "means": _means(exhibit, base)}
    with explained(f"{path} cannot be written"):
        base.mkdir(parents=True, exist_ok=True)
        path.write_text(strict_json(content, indent=1) + "\n", "utf-8")
    return path


def _means(exhibit: Exhibit, base: Path) -> list[dict[str, Any]]:
    """The errors of the lines with several runs, with their intervals."""
    found = []
    for (row, column), cells in by_line(exhibit.cells).items():
        outcomes = outcomes_of(cells, base)
        if len(outcomes) > 1:
            errors = {
                name: asdict(estimate([outcome["best"][name] for outcome in outcomes]))
                for name in ("train", "test")
            }
            found.append({"row": row, "column": column, **errors})
    return found


def outcomes_of(cells: Iterable[Cell], base: Path) -> list[dict[str, Any]]:
    """How those of the cells ended that have ended."""
    folders = [cell.folder(base) for cell in cells]
    return [folder.outcome() or {} for folder in folders if folder.finished]


def ratio_of_line(cells: Iterable[Cell], base: Path) -> Ratio | None:
    """The time ratio of a table's line: the median over its seeds or splits.

    None where HF has not ended in all of them.
    """
    ended = [cell for cell in cells if cell.folder(base).finished]
    ratios = [ratio for cell in ended if (ratio := ratio_of(cell, base)) is not None]
    if not ratios or len(ratios) < len(ended):
        return None
    kinds = {(ratio.total is None, ratio.bound) for ratio in ratios}
    totals = [ratio.total for ratio in ratios if ratio.total is not None]
    to_worse = [ratio.to_worse for ratio in ratios if ratio.to_worse is not None]
    # A median over runs that were cut short in different ways bounds nothing.
    return Ratio(
        total=statistics.median(totals) if totals and len(kinds) == 1 else None,
        bound=ratios[0].bound if len(kinds) == 1 else "",
        to_worse=statistics.median(to_worse) if to_worse else None,
    )


def _short(value: Any) -> Any:
    """A row without its long lists."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if key != "ritz_values"}


def _thinned(rows: list[Row]) -> list[Row]:
    """At most about 200 rows, the last among them."""
    every = math.ceil(len(rows) / CURVE_POINTS)
    return [row for row in rows if row["iteration"] % every == 0 or row is rows[-1]]
