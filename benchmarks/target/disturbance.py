"""Whether a run had the machine to itself, judged by the passes of the method's other runs."""

import itertools
import statistics
from pathlib import Path

from benchmarks.parts import Section, Sections
from benchmarks.records import read
from benchmarks.target.cells import KEYS, Cell

LEAST = 0.5
# Over less time a single step decides.
SHORTEST_SECONDS = 0.2


def share(run: Section, others: list[Section]) -> float | None:
    """The passes of a run by those that others made in the same time, their median.

    In the same time, because some methods spend more on their first steps. None where there is
    nothing to compare with.
    """
    shares = []
    for other in others:
        seconds = min(run["last"]["seconds"], other["last"]["seconds"])
        passes = passes_after(other, seconds)
        if seconds >= SHORTEST_SECONDS and passes > 0:
            shares.append(passes_after(run, seconds) / passes)
    return statistics.median(shares) if shares else None


def is_disturbed(run: Section, others: list[Section]) -> bool:
    """Whether a run made less than half of the passes of others, not for its setting's sake."""
    if run.get("slow"):
        return False
    found = share(run, others)
    return found is not None and found < LEAST


def other_runs(cell: Cell, device: str, folder: Path) -> list[Section]:
    """The method's other runs on the race, those on a device of this name.

    Without tries whose setting is slow: beside them a disturbed run would look as usual.
    """
    paths = sorted(folder.glob(f"{cell.race}.{cell.method}.*.json"))
    found = [read(path) for path in paths if path.stem != cell.name]
    here = [run for run in found if run["environment"]["device"] == device]
    return [run for run in here if not run.get("slow")]


def refused(sections: Sections) -> list[str]:
    """The names of the disturbed runs."""
    groups: dict[tuple[str, ...], Sections] = {}
    for name, run in sections.items():
        if run.get("slow"):
            continue
        key = (*name.split(".")[:2], run["environment"]["device"])
        groups.setdefault(key, {})[name] = run
    return [
        name
        for group in groups.values()
        for name, run in group.items()
        if is_disturbed(run, [other for key, other in group.items() if key != name])
    ]


def passes_after(run: Section, seconds: float) -> float:
    """Passes over the data by a time, between the points of the curve along a line."""
    time, passes = KEYS.index("seconds"), KEYS.index("passes")
    curve = run["curve"]
    for before, after in itertools.pairwise(curve):
        if after[time] >= seconds:
            part = (seconds - before[time]) / (after[time] - before[time])
            return float(before[passes] + part * (after[passes] - before[passes]))
    return float(curve[-1][passes])
