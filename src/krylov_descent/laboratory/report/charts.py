"""What the scripts draw, as JSON: plain lists of numbers, errors in the unit that is shown."""

import json
from collections.abc import Sequence
from typing import Any

from krylov_descent.laboratory.record import Row
from krylov_descent.laboratory.report.marks import curve_style
from krylov_descent.laboratory.report.numbers import is_number
from krylov_descent.laboratory.report.runs import Comparison, Run

SPLITS = ("train", "validation", "test")
AXES = {"seconds": "seconds", "iteration": "iterations", "passes": "passes over the data"}

# More points than a screen has columns show nothing more.
MOST_POINTS, MOST_FANS = 2_000, 300


def chart_json(comparison: Comparison) -> str:
    """The data of one problem's figures, safe inside a script element."""
    factor = 100.0 if comparison.unit == "%" else 1.0
    runs = [
        {
            "label": run.label,
            "style": curve_style(index),
            "state": run.state,
            **_curves(run, factor),
            "ritz": _ritz_values(run),
        }
        for index, run in enumerate(comparison.runs)
        if run.rows
    ]
    published = [
        {"method": row.get("method"), **{s: _rounded(row.get(s), factor) for s in SPLITS}}
        for row in comparison.published
    ]
    data = {
        "metric": comparison.metric,
        "unit": comparison.unit,
        "axes": AXES,
        "splits": [s for s in SPLITS if any(is_number(r.get(s)) for r in _all_rows(comparison))],
        "runs": runs,
        "published": published,
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # "</script>" in a name must not end the script element.
    return text.replace("<", "\\u003c")


def _curves(run: Run, factor: float) -> dict[str, Any]:
    rows = _thinned(run.rows, MOST_POINTS)
    if run.best is not None and run.best not in rows:
        rows = sorted([*rows, run.best], key=lambda row: int(row["iteration"]))
    return {
        **{axis: [_rounded(row.get(axis)) for row in rows] for axis in AXES},
        **{split: [_rounded(row.get(split), factor) for row in rows] for split in SPLITS},
        "best": rows.index(run.best) if run.best is not None else None,
    }


def _ritz_values(run: Run) -> dict[str, Any] | None:
    """The eigenvalues of each step's projected curvature, largest first."""
    rows = [row for row in run.rows if row.get("ritz_values")]
    if not rows:
        return None
    kept = _thinned(rows, MOST_FANS)
    return {
        "iteration": [row["iteration"] for row in kept],
        "values": [
            sorted(
                (_rounded(value) for value in row["ritz_values"] if is_number(value)),
                key=lambda value: -(value or 0.0),
            )
            for row in kept
        ],
    }


def _thinned(rows: Sequence[Row], most: int) -> list[Row]:
    """At most so many rows at equal distances, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (most - 1))] for i in range(most)]


def _rounded(value: object, factor: float = 1.0) -> float | None:
    if not isinstance(value, int | float) or not is_number(value):
        return None
    return float(f"{factor * value:.5g}")


def _all_rows(comparison: Comparison) -> list[Row]:
    return [row for run in comparison.runs for row in run.rows]
