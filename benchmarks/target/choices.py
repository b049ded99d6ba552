"""How the rate of a method and its decay are chosen from the runs that try them.

Four rates come first, each with the decay in the middle of the three. The other two decays are
tried with the best rate. A method without decay tries two more rates beside the best one instead,
so that every method has six tries. What counts is the time to the training error of the race, and
only where no run reaches it the training error at the end.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import UnavailableError
from benchmarks.parts import Section
from benchmarks.records import read
from benchmarks.target.cells import MIDDLE, Cell, first_tries, second_tries
from benchmarks.target.methods import METHODS


@dataclass(frozen=True)
class Choice:
    """A learning rate, and the part of the budget over which it falls to 0 (None: it stays)."""

    rate: float
    decay: float | None


def choice_of(cell: Cell, folder: Path) -> Choice | None:
    """What to run a cell with; None for methods without a learning rate.

    Raises:
        UnavailableError: a run that decides is not there yet, or was made with other rules.
    """
    method = METHODS[cell.method]
    if not method.rates:
        return None
    if cell.stage == "rate":
        return Choice(cell.value, MIDDLE if method.decays else None)
    kind = method.kind or cell.method
    tried = _read(first_tries(cell.race, kind), folder)
    if cell.stage == "decay":
        return Choice(best(tried).rate, cell.value)
    if cell.stage == "near":
        return Choice(best(tried).rate * cell.value, None)
    return best([*tried, *_read(second_tries(cell.race, kind), folder)])


def best(tried: Iterable[Section]) -> Choice:
    """The fastest to the training error; where none reached it, the lowest error at the end.

    Raises:
        UnavailableError: all of them ended in NaN.
    """
    finite = [run for run in tried if run["last"]["train"] is not None]
    if not finite:
        raise UnavailableError("every learning rate of the grid ended in NaN")
    found = min(finite, key=lambda run: (_time(run), run["last"]["train"]))
    return Choice(found["rate"], found["decay"])


def time_to_beat(cell: Cell, folder: Path) -> float:
    """The least time to the training error among the other tries; infinity if there is none.

    A try that has not reached the error by then cannot be the best any more.
    """
    tries = [*first_tries(cell.race, cell.method), *second_tries(cell.race, cell.method)]
    paths = [folder / f"{other.name}.json" for other in tries if other != cell]
    return min((_time(read(path)) for path in paths if path.exists()), default=math.inf)


def _time(run: Section) -> float:
    seconds = run["reached"]["train"]
    return math.inf if seconds is None else float(seconds)


def _read(cells: Iterable[Cell], folder: Path) -> list[Section]:
    found = []
    for cell in cells:
        path = folder / f"{cell.name}.json"
        if not path.exists():
            raise UnavailableError(f"its learning rate is not tuned yet: {cell.name} is missing")
        found.append(read(path))
        if "decay" not in found[-1]:
            raise UnavailableError(f"{path} was made before decays were tried: remove it")
    return found
