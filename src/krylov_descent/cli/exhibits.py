"""`ksd reproduce`: the paper's table and figures, cell by cell."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from krylov_descent.cli.options import WHAT, WHERE, DataFolder, Device
from krylov_descent.cli.running import (
    EXIT_INTERRUPTED,
    console,
    is_there,
    run,
    say,
    say_interrupted,
)
from krylov_descent.laboratory.figures import draw_convergence
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.reproduce import (
    EXHIBITS,
    Cell,
    Exhibit,
    Ratio,
    exhibit,
    ratio_of,
    summarize,
)
from krylov_descent.laboratory.runs import load
from krylov_descent.laboratory.training import Ending

SIGNS = {"": "", "at most": "≤ ", "at least": "≥ "}
Name = Annotated[
    str, typer.Argument(metavar="EXHIBIT", help=" or ".join(EXHIBITS) + ".", show_default=False)
]
Rows = Annotated[
    str | None,
    typer.Option(
        metavar="PROBLEMS", help="Only these, with commas between them.", rich_help_panel=WHAT
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Small forms, 20 seconds each, to try it.", rich_help_panel=WHAT),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="For runs and results; by default runs/reproduce.",
        rich_help_panel=WHERE,
    ),
]


def reproduce(
    name: Name,
    rows: Rows = None,
    quick: Quick = False,
    device: Device = "cpu",
    folder: Folder = None,
    data: DataFolder = None,
) -> None:
    """Re-run a table or figure of the paper, beside the published numbers.

    Each cell is a run. Cells that are in the folder already are not run again, and an unfinished
    one goes on, so the whole can be made in several sittings; what is not there yet is shown as
    missing.
    """
    wanted = exhibit(name).adapted(device, quick)
    chosen = [row.strip() for row in rows.split(",")] if rows else wanted.rows
    cells = wanted.of_rows(chosen)
    base = folder or Path("runs") / f"reproduce{'-quick' if quick else ''}"
    try:
        _fill(wanted, cells, base, data)
    finally:  # also when a later cell failed or was interrupted
        if any(cell.folder(base).started for cell in wanted.cells):
            say(f"Results: {summarize(wanted, base)}")
            show(wanted, base)


def _fill(wanted: Exhibit, cells: list[Cell], base: Path, data: Path | None) -> None:
    loaded: dict[str, Problem] = {}
    for cell in cells:
        target = cell.folder(base)
        if is_there(cell.settings, target):
            say(f"{cell.row}, {cell.column}: there already")
            continue
        say(f"{cell.row}, {cell.column}")
        if cell.row not in loaded:
            loaded = {cell.row: load(cell.settings, data)}  # one at a time: they are large
        ending = run(cell.settings, loaded[cell.row], target, resume=target.started)
        if ending is Ending.INTERRUPTED:
            say_interrupted(target, "the same command")
            raise typer.Exit(EXIT_INTERRUPTED)
        summarize(wanted, base)


def show(exhibit: Exhibit, base: Path) -> None:
    """Print the table, or draw the figure."""
    if exhibit.name.startswith("figure"):
        path = base / f"{exhibit.name}.png"
        runs = {cell.column: cell.folder(base) for cell in exhibit.cells}
        draw_convergence(runs, path, title=exhibit.title, error="training error")
        say(f"Figure: {path}")
        return
    table = Table(title=exhibit.title, box=box.SIMPLE_HEAD)
    table.add_column("")
    for heading in ("train", "test", "time / HF", "to equal error / HF"):
        table.add_column(heading, justify="right")
    for row in exhibit.rows:
        cells = [cell for cell in exhibit.cells if cell.row == row]
        table.add_row(row, style="bold")
        for line in _lines(cells, base):
            table.add_row(*line)
        table.add_section()
    console.print(table)


def _lines(cells: list[Cell], base: Path) -> list[list[str]]:
    """A problem's cells, then what the paper has."""
    lines: list[list[str]] = []
    published: list[list[str]] = []
    for cell in cells:
        folder = cell.folder(base)
        outcome = folder.outcome() if folder.finished else None
        if outcome is None:
            lines.append([f"  {cell.column}", "missing"])
            continue
        problem, best = folder.config()["problem"], outcome["best"]
        unit = problem["metric"]["unit"]
        errors = [_error(best[split], unit) for split in ("train", "test")]
        lines.append([f"  {cell.column}", *errors, *_ratios(ratio_of(cell, base))])
        published = [_published(row, unit) for row in problem["published"] if row["time"]]
    return lines + published


def _published(row: dict[str, Any], unit: str) -> list[str]:
    errors = [_error(row[split], unit) for split in ("train", "test")]
    return [f"  {row['method']} in the paper", *errors, f"{row['time']:g}", ""]


def _error(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}%" if unit == "%" else f"{value:.3g}"


def _ratios(ratio: Ratio | None) -> list[str]:
    if ratio is None:
        return ["", ""]
    total = "-" if ratio.total is None else f"{SIGNS[ratio.bound]}{ratio.total:.2g}"
    return [total, "-" if ratio.to_worse is None else f"{ratio.to_worse:.2g}"]
