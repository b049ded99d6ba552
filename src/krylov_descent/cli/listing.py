"""Lists of what there is: problems, optimisers, data files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from krylov_descent.cli.speaking import console, say
from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.contenders import CONTENDERS, PAPER, competitor
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.problems.tuned_rates import RATES
from krylov_descent.laboratory.signatures import Option
from krylov_descent.laboratory.sources import (
    FOLDER_VARIABLE,
    FileStatus,
    data_folder,
    fetch,
    fetch_command,
    inventory,
)
from krylov_descent.laboratory.yardsticks import YARDSTICKS


def problems(name: str | None) -> None:
    """List the problems, or the options of one."""
    if name is None:
        _show_entries((entry.name, entry.summary) for entry in PROBLEMS.values())
        say("Options of one: ksd problems curves")
        return
    if name not in PROBLEMS:
        raise unknown_name("problem", name, PROBLEMS)
    entry = PROBLEMS[name]
    say(f"{entry.title}. {entry.summary}")
    _show_options("--problem-set", entry.options)


def optimizers(name: str | None) -> None:
    """List the optimisers, or the options of one."""
    if name is None:
        _show_entries((entry.name, entry.summary) for entry in CONTENDERS.values())
        say("Any torch optimiser by its path: --optimizer torch.optim.RMSprop")
        say(f"Beside them, where there are classes: {', '.join(YARDSTICKS)}")
        say("Options of one: ksd optimizers ksd")
        return
    entry = competitor(name)
    say(f"{entry.title}. {entry.summary}")
    _show_options("--set", entry.options)
    if name == PAPER:
        say(f"K, the dimension, is {_paper_dimensions()}. Nothing else has settings in the paper.")
    for rates in RATES.values():
        if name in rates:
            say(f"Rate: {rates[name]}")
    if any(name in rates for rates in RATES.values()):
        say("Elsewhere the rate is not tuned: give one with --set lr=NUMBER")


def _paper_dimensions() -> str:
    """K of each problem that the paper trained."""
    rows: dict[int, list[str]] = {}
    for problem in PROBLEMS.values():
        if problem.paper_dimension is not None:
            rows.setdefault(problem.paper_dimension, []).append(problem.name)
    return " and ".join(f"{k} for {', '.join(names)}" for k, names in rows.items())


def data_list(data: Path | None) -> None:
    """Show the data files and where they are looked for."""
    found = inventory(data)
    _show_files(found, data_folder(data))
    if any(status.downloadable and not status.present for status in found):
        say(f"Get what is missing: {fetch_command(data)}")
    say(f"Another folder: --data FOLDER, or the environment variable {FOLDER_VARIABLE}")


def data_fetch(files: list[str] | None, data: Path | None) -> None:
    """Download what is missing or damaged, and check it."""
    wanted = files or [status.name for status in inventory(data) if status.downloadable]
    _show_files(fetch(wanted, data), data_folder(data))


def data_verify(files: list[str] | None, data: Path | None) -> bool:
    """Read the files that are there and compare their sha256.

    Returns:
        whether none is damaged, and none that was named is missing.
    """
    found = inventory(data, names=files, verify=True)
    _show_files(found, data_folder(data))
    missing = files and not all(status.present for status in found)
    return not missing and all(status.ok is not False for status in found)


def _show_entries(entries: Iterable[tuple[str, str]]) -> None:
    table = Table("name", "what it is", box=box.SIMPLE_HEAD)
    for name, summary in entries:
        table.add_row(name, summary)
    console.print(table)


def _show_options(flag: str, options: Sequence[Option]) -> None:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(f"{flag} …=", no_wrap=True)
    table.add_column("default", overflow="fold")
    table.add_column("what it is")
    for option in options:
        table.add_row(option.name, option.default, option.meaning)
    console.print(table, markup=False)


def _show_files(found: list[FileStatus], folder: object) -> None:
    say(f"Data folder: {folder}")
    table = Table("file", "state", box=box.SIMPLE_HEAD)
    table.add_column("bytes", justify="right")
    for status in found:
        state = "missing" if status.downloadable else "not there (optional)"
        if status.present:
            state = "there" if status.ok is None else "whole" if status.ok else "DAMAGED"
        table.add_row(status.name, state, "" if status.size is None else f"{status.size:,}")
    console.print(table)
