"""What the scripts draw, as JSON: plain lists of numbers, errors in the unit that is shown."""

import json
import math
from collections.abc import Sequence
from typing import Any

from krylov_descent.laboratory.record import Row
from krylov_descent.laboratory.report.bands import band, thinned
from krylov_descent.laboratory.report.comparison import Comparison
from krylov_descent.laboratory.report.methods import RESULT, Method, Spread
from krylov_descent.laboratory.report.numbers import is_number
from krylov_descent.laboratory.report.runs import Run

SPLITS = ("train", "validation", "test")
AXES = {"seconds": "seconds", "iteration": "iterations", "passes": "passes over the data"}

# More points than a screen has columns show nothing more.
MOST_POINTS, MOST_FANS = 2_000, 300


def chart_json(comparison: Comparison) -> str:
    """The data of one problem's figures, safe inside a script element."""
    factor = 100.0 if comparison.unit == "%" else 1.0
    drawn = [method for method in comparison.methods if method.counted]
    published = [
        {"method": row.get("method"), **{s: _rounded(row.get(s), factor) for s in SPLITS}}
        for row in comparison.published
    ]
    data = {
        "title": comparison.heading,
        "metric": comparison.metric,
        "unit": comparison.unit,
        "axes": AXES,
        "splits": splits(comparison),
        "target": {"split": RESULT, "value": _rounded(comparison.target, factor)},
        "methods": [_method(method, comparison.target, factor) for method in drawn],
        "published": published,
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # "</script>" in a name must not end the script element.
    return text.replace("<", "\\u003c")


def splits(comparison: Comparison) -> list[str]:
    """The sets of data that some run has an error on."""
    rows = [row for run in comparison.runs for row in run.rows]
    return [split for split in SPLITS if any(is_number(row.get(split)) for row in rows)]


def _method(method: Method, target: float | None, factor: float) -> dict[str, Any]:
    best = {split: _spread(method.best(split), factor) for split in SPLITS}
    drawn = [run for run in method.runs if run.rows]
    return {
        "label": method.label,
        "style": method.style,
        "note": _note(method),
        "best": best,
        "seconds_to_target": None if target is None else _spread(method.seconds_to(target)),
        "runs": [_curves(run, factor) for run in drawn],
        "line": next(i for i, run in enumerate(drawn) if run is method.counted[0]),
        "band": _band(method, factor) if len(method.counted) > 1 else None,
        "ritz": _ritz_values(method),
    }


def _note(method: Method) -> str:
    """What the curve is of, where that is not one finished run."""
    if len(method.runs) == 1:
        state = method.runs[0].state
        return "" if state == "finished" else state
    counted = len(method.counted)
    return (
        f"{counted} seeds"
        if counted == len(method.runs)
        else f"{counted} of {len(method.runs)} seeds"
    )


def _curves(run: Run, factor: float) -> dict[str, Any]:
    rows = thinned(run.rows, MOST_POINTS)
    if run.best is not None and run.best not in rows:
        rows = sorted([*rows, run.best], key=lambda row: int(row["iteration"]))
    return {
        "seed": run.config.get("seed"),
        "state": run.state,
        "rows": len(run.rows),
        **{axis: [_rounded(row.get(axis)) for row in rows] for axis in AXES},
        **{split: [_rounded(row.get(split), factor) for row in rows] for split in SPLITS},
        "best": rows.index(run.best) if run.best is not None else None,
    }


def _band(method: Method, factor: float) -> dict[str, Any]:
    """By axis and split: the places, and at each of them the lowest, middle and highest error."""
    made: dict[str, Any] = {}
    for axis in AXES:
        bands = {split: band(method.counted, axis, split) for split in SPLITS}
        made[axis] = {"x": [_rounded(x) for x in bands[RESULT].x]}
        for split, found in bands.items():
            made[axis][split] = {
                name: [_rounded(value, factor) for value in values]
                for name, values in (
                    ("low", found.low),
                    ("middle", found.middle),
                    ("high", found.high),
                )
            }
    return made


def _ritz_values(method: Method) -> dict[str, Any] | None:
    """The eigenvalues of each step's projected curvature, largest first, of the first run."""
    found = method.first_with(lambda run: _with_ritz_values(run) or None)
    if found is None:
        return None
    label, rows = found
    kept = thinned(rows, MOST_FANS)
    return {
        "label": label,
        "iteration": [row["iteration"] for row in kept],
        "values": [
            sorted(
                (_rounded(value) for value in row["ritz_values"] if is_number(value)),
                key=lambda value: -(value or 0.0),
            )
            for row in kept
        ],
    }


def has_ritz_values(comparison: Comparison) -> bool:
    """Whether there is a figure of them to draw."""
    return any(_with_ritz_values(run) for method in comparison.methods for run in method.counted)


def _with_ritz_values(run: Run) -> list[Row]:
    return [row for row in run.rows if row.get("ritz_values")]


def _spread(found: Spread | None, factor: float = 1.0) -> Sequence[float | None] | None:
    """Middle, lowest and highest; null for what is not finite or not reached."""
    if found is None:
        return None
    return [_rounded(value, factor) for value in (found.middle, found.low, found.high)]


def _rounded(value: object, factor: float = 1.0) -> float | None:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{factor * value:.5g}")
