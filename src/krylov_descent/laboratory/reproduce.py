"""The paper's Table 2 and figures as cells: runs that are made once and then kept.

A cell is one run with fixed settings. Its folder holds what every run folder holds; what is
there already is not made again, so that a table can be filled over several sittings and on
several machines. What is not there is shown as missing.
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.runs import RunSettings
from krylov_descent.laboratory.training import Ending, Limits

PAPER, BEST, HF = "KSD, paper's settings", "KSD, best settings", "HF"
# The paper's table says 5 units; a curve through three points has six degrees of freedom, and the
# other papers have 6.
CURVES_CODE_6 = "curves-code-6"
QUICK_SECONDS = 20.0
# A run that has not stopped by itself after so long is shown as it is then.
LONGEST_SECONDS = 600.0
# Endings that say nothing about how long the run would have taken.
CUT_SHORT = [e.name.lower() for e in (Ending.ITERATIONS, Ending.SECONDS, Ending.PASSES)]
CURVE_KEYS = ("iteration", "seconds", "passes", "train", "validation", "test")
CURVE_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a table or figure.

    Attributes:
        row: a problem, or a form of one.
        column: what is run on it.
        settings: of the run.
    """

    row: str
    column: str
    settings: RunSettings

    def folder(self, base: Path) -> RunFolder:
        """Where its run is kept."""
        name = self.column.replace(",", "").replace("'", "").replace(" ", "-").lower()
        return RunFolder(base / self.row / name)


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or figure of the paper, as the cells it is made of."""

    name: str
    title: str
    cells: tuple[Cell, ...] = field(repr=False)

    @property
    def rows(self) -> list[str]:
        """The problems, or forms of one, that it is about."""
        return list(dict.fromkeys(cell.row for cell in self.cells))

    def adapted(self, device: str, quick: bool) -> "Exhibit":
        """The same on a device, in the small form where it is to be quick."""
        cells = (
            replace(cell, settings=_adapted(cell.settings, device, quick)) for cell in self.cells
        )
        return replace(self, cells=tuple(cells))

    def of_rows(self, rows: Iterable[str]) -> list[Cell]:
        """The cells of some rows; an unknown one is answered with the nearest."""
        wanted = list(rows)
        for row in wanted:
            if row not in self.rows:
                raise unknown_name(f"row of {self.name}", row, self.rows)
        return [cell for cell in self.cells if cell.row in wanted]


def _adapted(settings: RunSettings, device: str, quick: bool) -> RunSettings:
    settings = replace(settings, device=device)
    if not quick:
        return settings
    # The small forms have no published settings to keep to.
    options = {k: v for k, v in settings.optimizer_options.items() if k == "curvature"}
    return replace(
        settings,
        problem_options={**settings.problem_options, "size": "small"},
        optimizer_options=options,
        limits=replace(settings.limits, seconds=QUICK_SECONDS),
    )


def _cell(row: str, column: str, optimizer: str, **options: Any) -> Cell:
    problem, problem_options = ("curves", {"code_size": 6}) if row == CURVES_CODE_6 else (row, {})
    return Cell(
        row=row,
        column=column,
        settings=RunSettings(
            problem=problem,
            problem_options=problem_options,
            optimizer=optimizer,
            optimizer_options=options,
            limits=Limits(seconds=LONGEST_SECONDS),
        ),
    )


def _table2() -> Iterator[Cell]:
    # The best of a few short trial runs by validation error, not a search.
    best: dict[str, dict[str, Any]] = {
        "curves": {"dimension": 80, "subset_size": 0.25},
        CURVES_CODE_6: {"dimension": 80, "subset_size": 0.25},
        "mnist-autoencoder": {"dimension": 80, "subset_size": 7_500},
        "mnist-classifier": {"dimension": 20, "subset_size": 3_000},
        "mnist-classifier-pretrained": {"dimension": 20, "subset_size": 3_000},
    }
    for row, options in best.items():
        yield _cell(row, HF, "hf")
        yield _cell(row, PAPER, "ksd-paper")
        yield _cell(row, BEST, "ksd", **options)


def _figure2() -> Iterator[Cell]:
    for title, optimizer in (("KSD", "ksd-paper"), ("HF", "hf")):
        for curvature in ("gauss-newton", "hessian"):
            yield _cell("curves", f"{title} {curvature}", optimizer, curvature=curvature)
    yield _cell("curves", "L-BFGS", "lbfgs")


EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit
    for exhibit in (
        Exhibit(name="table2", title="Table 2 of the paper", cells=tuple(_table2())),
        Exhibit(name="figure2", title="Figure 2 of the paper: CURVES", cells=tuple(_figure2())),
    )
}


def exhibit(name: str) -> Exhibit:
    """The table or figure of a name; an unknown one is answered with the nearest."""
    if name not in EXHIBITS:
        raise unknown_name("exhibit", name, EXHIBITS)
    return EXHIBITS[name]


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
    """Both measures; None where one of the runs has not ended."""
    if not (ksd.finished and hf.finished):
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


def ratio_of(cell: Cell, base: Path) -> Ratio | None:
    """The time ratio of a table's cell; None for HF itself, and where there is none yet."""
    if cell.column not in (PAPER, BEST):
        return None
    return time_ratio(cell.folder(base), replace(cell, column=HF).folder(base))


def summarize(exhibit: Exhibit, base: Path) -> Path:
    """Write what the cells found as one JSON file; unfinished ones as null. Returns its path."""
    cells = []
    for cell in exhibit.cells:
        folder = cell.folder(base)
        outcome = folder.outcome() if folder.finished else None
        found: dict[str, Any] = {"row": cell.row, "column": cell.column, "outcome": None}
        if outcome is not None:
            config = folder.config()
            found |= {
                "outcome": {key: _short(value) for key, value in outcome.items()},
                "optimizer": config["optimizer"],
                "versions": config["versions"],
                "command": config["command"],
                "curve": [{key: row[key] for key in CURVE_KEYS} for row in _thinned(folder.rows())],
            }
            ratio = ratio_of(cell, base)
            if ratio is not None:
                found["time_ratio"] = asdict(ratio)
        cells.append(found)
    path = base / f"{exhibit.name}.json"
    base.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"title": exhibit.title, "cells": cells}, indent=1) + "\n")
    return path


def _short(value: Any) -> Any:
    """A row without its long lists."""
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if key != "ritz_values"}


def _thinned(rows: list[Row]) -> list[Row]:
    """At most about 200 rows, the last among them."""
    every = math.ceil(len(rows) / CURVE_POINTS)
    return [row for row in rows if row["iteration"] % every == 0 or row is rows[-1]]
