"""How much larger the test error is than the training error, run by run, on the way down."""

import torch

from benchmarks.parts import NOT_MEASURED, Section, Sections, markdown
from benchmarks.target.cells import KEYS
from benchmarks.target.methods import methods_of
from benchmarks.target.tables import seeds_of

RACE = "curves"
LEVELS = (0.4, 0.1)  # of the training error
NEVER = "–"


def gap_table(sections: Sections, device: torch.device) -> str:
    """For each method that comes down to a level: test error by training error there, by seed."""
    rows = [
        [described.title, *(", ".join(_ratio(run, level) for run in runs) for level in LEVELS)]
        for method, described in methods_of(device.type).items()
        if (runs := seeds_of(sections, RACE, method))
    ]
    shown = [row for row in rows if set(row[1]) - set(f"{NEVER}, ")]
    if not shown:
        return NOT_MEASURED
    return markdown([["method", *(f"at {level:g}" for level in LEVELS)], *shown])


def _ratio(run: Section, level: float) -> str:
    """Where the training error is at most the level for the first time."""
    train, test = KEYS.index("train"), KEYS.index("test")
    there = (point for point in run["curve"] if point[train] is not None and point[train] <= level)
    point = next(there, None)
    return NEVER if point is None else f"{point[test] / point[train]:.2f}"
