"""The lines of the paper's Table 2 and of the table of recurrent nets, as text.

For the terminal and for the documentation alike.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from krylov_descent.laboratory import sequence_exhibit
from krylov_descent.laboratory.repeats import Estimate, estimate
from krylov_descent.laboratory.reproduce import Cell, Exhibit, by_line
from krylov_descent.laboratory.results import Ratio, outcomes_of, ratio_of_line
from krylov_descent.laboratory.sequence_exhibit import verdict

Line = list[str]
MISSING = "missing"
SIGNS = {"": "", "at most": "≤ ", "at least": "≥ "}
ERROR_HEADINGS = ["train", "test", "time / HF", "to equal error / HF"]
TIME = ERROR_HEADINGS.index("time / HF")


def headings(exhibit: Exhibit) -> list[str]:
    """What the columns after the first are called."""
    if exhibit.name == sequence_exhibit.NAME:
        return list(sequence_exhibit.COLUMNS)
    return ERROR_HEADINGS


def lines(exhibit: Exhibit, base: Path) -> Iterator[Line]:
    """The lines of a table: a name, then the columns. The name alone is a heading."""
    for row in exhibit.rows:
        cells = exhibit.of_rows([row])
        if exhibit.name == sequence_exhibit.NAME:
            yield [row, *(_solved(cell, base) for cell in cells)]
        else:
            yield [row]
            yield from _errors(cells, base)


def legend(exhibit: Exhibit, shown: Iterable[Line]) -> str | None:
    """What the signs in the lines mean; None where there are none."""
    columns = [line[1:] for line in shown]
    if exhibit.name == sequence_exhibit.NAME:
        brackets = any(text.startswith("(") for texts in columns for text in texts)
        return "in brackets: ended before its limit" if brackets else None
    times = [texts[TIME] for texts in columns if len(texts) > TIME]
    signs = any(text == "-" or text.startswith(("≤", "≥")) for text in times)
    # Runs may also be cut short in different ways, which leaves their median without a bound.
    return "≥/≤: a time limit ended one of the runs; -: both, or different ones" if signs else None


def _solved(cell: Cell, base: Path) -> str:
    """Seconds until a task was solved, or how much is wrong; in brackets if it was interrupted."""
    folder = cell.folder(base)
    found = verdict(folder)
    if found is None:
        return MISSING
    if found.seconds is not None:
        return f"{found.seconds:.3g} s"
    wrong = f"{100 * found.error:.3g}%"
    return wrong if folder.finished else f"({wrong})"


def _errors(cells: list[Cell], base: Path) -> list[Line]:
    """A problem's lines, several runs as their mean, then what the paper has."""
    found: list[Line] = []
    published: list[Line] = []
    for (_, column), line in by_line(cells).items():
        outcomes = outcomes_of(line, base)
        if not outcomes:
            found.append([column, MISSING])
            continue
        there = f" ({len(outcomes)} of {len(line)})" if len(outcomes) < len(line) else ""
        folders = [cell.folder(base) for cell in line]
        problem = next(folder for folder in folders if folder.finished).config()["problem"]
        unit = problem["metric"]["unit"]
        errors = [
            _estimate(estimate([outcome["best"][part] for outcome in outcomes]), unit)
            for part in ("train", "test")
        ]
        found.append([column + there, *errors, *_ratios(ratio_of_line(line, base))])
        published = [_published(row, unit) for row in problem["published"] if row["time"]]
    return found + published


def _published(row: dict[str, Any], unit: str) -> Line:
    errors = [_error(row[split], unit) for split in ("train", "test")]
    return [f"{row['method']} in the paper", *errors, f"{row['time']:g}", ""]


def _error(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.2f}%" if unit == "%" else f"{value:.3g}"


def _estimate(found: Estimate, unit: str) -> str:
    """A mean, with its 95% interval if there are several runs, which has two digits."""
    if not found.half_width:
        return _error(found.mean, unit)
    scale = 100 if unit == "%" else 1
    mean, half_width = scale * found.mean, scale * found.half_width
    decimals = max(0, 1 - math.floor(math.log10(half_width)))
    return f"{mean:.{decimals}f} ± {half_width:.{decimals}f}{unit}"


def _ratios(ratio: Ratio | None) -> list[str]:
    if ratio is None:
        return ["", ""]
    total = "-" if ratio.total is None else f"{SIGNS[ratio.bound]}{ratio.total:.2g}"
    return [total, "-" if ratio.to_worse is None else f"{ratio.to_worse:.2g}"]
