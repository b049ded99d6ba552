"""Several runs as one curve with a band: median, lowest and highest, as steps."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from krylov_descent.laboratory.report.methods import spread
from krylov_descent.laboratory.report.numbers import is_number
from krylov_descent.laboratory.report.runs import Run

# More steps than a screen has columns show nothing more.
MOST_STEPS = 600
Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Band:
    """Each number holds from its x to the next one; None where a run has no finite error."""

    x: list[float]
    low: list[float | None]
    middle: list[float | None]
    high: list[float | None]


def band(runs: Sequence[Run], axis: str, split: str, most: int = MOST_STEPS) -> Band:
    """The errors of runs over an axis, up to the end of the longest run.

    An error holds until the next one is measured, the last error of a run to the end.
    """
    places = [[float(row[axis]) for row in run.rows] for run in runs]
    x = thinned(sorted({x for xs in places for x in xs}), most)
    made = Band(x, [], [], [])
    for at in x:
        values = [
            run.rows[bisect_right(xs, at) - 1].get(split)
            for run, xs in zip(runs, places, strict=True)
        ]
        found = spread(values) if all(map(is_number, values)) else None
        made.low.append(found.low if found else None)
        made.middle.append(found.middle if found else None)
        made.high.append(found.high if found else None)
    return made


def thinned(things: Sequence[Thing], most: int) -> list[Thing]:
    """At most so many things at equal distances, the first and the last among them."""
    if len(things) <= most:
        return list(things)
    return [things[round(i * (len(things) - 1) / (most - 1))] for i in range(most)]
