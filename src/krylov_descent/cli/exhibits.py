"""The paper's table and figures, cell by cell."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import typer
from rich import box
from rich.table import Table

from krylov_descent.cli.running import EXIT_INTERRUPTED, is_there, run, say_interrupted
from krylov_descent.cli.speaking import complain, console, say
from krylov_descent.laboratory.exhibit_lines import headings, legend, lines
from krylov_descent.laboratory.figures import draw_convergence
from krylov_descent.laboratory.limits import Ending
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.progress import places
from krylov_descent.laboratory.record import RunFolderError
from krylov_descent.laboratory.reproduce import Cell, Exhibit, exhibit
from krylov_descent.laboratory.results import summarize
from krylov_descent.laboratory.runs import load
from krylov_descent.laboratory.waiting import waiting


def reproduce(
    name: str,
    rows: str | None,
    *,
    quick: bool,
    show_only: bool,
    device: str,
    folder: Path | None,
    data: Path | None,
) -> None:
    """Fill the cells of an exhibit that are not there yet, and show it.

    Args:
        name: of the exhibit.
        rows: problems, with commas between them; all if None.
        quick: the small forms.
        show_only: run nothing.
        device: where to run.
        folder: of the runs; by default runs/reproduce.
        data: the data folder.
    """
    wanted = exhibit(name).adapted(device, quick)
    chosen = wanted.only(row.strip() for row in rows.split(",")) if rows else wanted
    base = folder or Path("runs") / f"reproduce{'-quick' if quick else ''}"
    if show_only and not _begun(chosen, base):
        these = f"{name} --rows {rows}" if rows else name
        raise RunFolderError(
            f"{base} holds no run of {these} yet: leave out --show, or name another --folder"
        )
    try:
        if not show_only:
            _fill(wanted, chosen.cells, base, data)
    finally:  # also when a later cell failed or was interrupted
        if _begun(chosen, base):
            _show(chosen, base)
            _collect(wanted, chosen, base)


def _begun(chosen: Exhibit, base: Path) -> bool:
    return any(cell.folder(base).started for cell in chosen.cells)


def _fill(wanted: Exhibit, cells: Iterable[Cell], base: Path, data: Path | None) -> None:
    missing, refused = [], False
    for cell in cells:
        try:
            if is_there(cell.settings, cell.folder(base)):
                say(f"{cell.title}: there already")
            else:
                missing.append(cell)
        except RunFolderError as problem:  # does not keep the others from being made
            complain(str(problem))
            refused = True
    loaded: dict[str, Problem] = {}
    for cell, place in zip(missing, places([c.settings.limits for c in missing]), strict=True):
        say(cell.title)
        needed = f"{cell.row}, split {cell.split}"
        if needed not in loaded:
            with waiting(console, f"loading {needed if cell.split is not None else cell.row}"):
                loaded = {needed: load(cell.settings, data)}  # one at a time: they are large
        target = cell.folder(base)
        ending = run(cell.settings, loaded[needed], target, resume=target.started, place=place)
        if ending is Ending.INTERRUPTED:
            say_interrupted(target, "the same command")
            raise typer.Exit(EXIT_INTERRUPTED)
        summarize(wanted, base)
    if refused:
        raise typer.Exit(1)


def _collect(wanted: Exhibit, chosen: Exhibit, base: Path) -> None:
    """Write what was found into the folder; one that can only be read is no failure."""
    files: dict[str, Callable[[], Path]] = {"Results": partial(summarize, wanted, base)}
    if _is_figure(chosen):
        files["Figure"] = partial(_draw, chosen, base)
    failures = []
    for name, write in files.items():
        try:
            say(f"{name}: {write()}")
        except RunFolderError as problem:
            failures.append(str(problem))
    if failures:
        complain(f"Not brought up to date: {'; '.join(failures)}")


def _draw(figure: Exhibit, base: Path) -> Path:
    path = base / f"{figure.name}.png"
    runs = {cell.column: cell.folder(base) for cell in figure.cells}
    draw_convergence(runs, path, title=figure.title, error="training error")
    return path


def _is_figure(exhibit: Exhibit) -> bool:
    return exhibit.name.startswith("figure")


def _show(exhibit: Exhibit, base: Path) -> None:
    """Print the table; a figure has none."""
    if _is_figure(exhibit):
        return
    table = Table(title=exhibit.title, box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for heading in headings(exhibit):
        table.add_column(heading, justify="right", no_wrap=len(heading) < 10)
    shown = list(lines(exhibit, base))
    for name, *columns in shown:
        if columns:
            table.add_row(f"  {name}", *columns)
        else:
            table.add_section()
            table.add_row(name, style="bold")
    console.print(table)
    if signs := legend(exhibit, shown):
        say(signs)
