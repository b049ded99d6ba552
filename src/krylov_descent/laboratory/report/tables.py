"""The tables of errors: results, every run, the published numbers, terms."""

from collections.abc import Callable, Iterable
from functools import partial
from html import escape
from typing import Any

from krylov_descent.laboratory.report.charts import SPLITS
from krylov_descent.laboratory.report.comparison import Comparison
from krylov_descent.laboratory.report.marks import swatch
from krylov_descent.laboratory.report.methods import Method, Spread
from krylov_descent.laboratory.report.numbers import (
    NOTHING,
    duration,
    error,
    given,
    is_number,
    plain,
)

NOT_REACHED = "not reached"
# Groups of columns, of which the first has a line at its left.
Columns = list[tuple[str, list[str]]]


def results_table(comparison: Comparison) -> str:
    """One row for each method, the best first."""
    return _results("Results", comparison, comparison.methods, "Method")


def runs_table(comparison: Comparison) -> str:
    """One row for each run; empty where each method has one."""
    alone = all(len(method.runs) == 1 for method in comparison.methods)
    runs = [run for method in comparison.methods for run in method.one_by_one()]
    return "" if alone else _results("Every run", comparison, runs, "Run")


def results_note(comparison: Comparison) -> str:
    """What the numbers of the results are."""
    percent = ", in per cent" if comparison.unit == "%" else ""
    sentences = [
        f"Errors are the {comparison.metric}{percent}.",
        "The first three are those of the iteration with the lowest validation error; without a "
        "validation set, of the last one.",
        "Time is that of the steps, without measuring.",
    ]
    if comparison.target is not None:
        sentences.append(
            f"Time to {given(comparison.target, comparison.unit)} is that until the test error was "
            "first at or below it; --target names another."
        )
    if any(len(method.counted) > 1 for method in comparison.methods):
        sentences.append("Of several seeds it is the median; a range is from lowest to highest.")
    return f'<p class="note">{escape(" ".join(sentences))}</p>'


def _results(name: str, comparison: Comparison, methods: list[Method], what: str) -> str:
    target = comparison.target
    to_target = [] if target is None else [f"to {given(target, comparison.unit)}"]
    groups: Columns = [
        ("At the best validation error", list(SPLITS)),
        ("At the end", list(SPLITS)),
        ("Time", [*to_target, "in all"]),
        ("To the end", ["iterations", "passes"]),
    ]
    rows = "".join(_row(comparison, method) for method in methods)
    head = (
        f'<thead><tr><th rowspan="2" scope="col">{what}</th>{_over(groups)}'
        f'<th rowspan="2" scope="col" class="text">How it ended</th></tr>'
        f"<tr>{_under(groups)}</tr></thead>"
    )
    return scrolling(name, f'<table class="results">{head}<tbody>{rows}</tbody></table>')


def _row(comparison: Comparison, method: Method) -> str:
    unit, target = comparison.unit, comparison.target
    times = [] if target is None else [_with_range(method.seconds_to(target), _time)]
    groups = [
        [_with_range(method.best(split), partial(error, unit=unit)) for split in SPLITS],
        [_cell(method.last(split), partial(error, unit=unit)) for split in SPLITS],
        [*times, _cell(method.last("seconds"), _time)],
        [_cell(method.last("iteration"), plain), _cell(method.last("passes"), plain)],
    ]
    seeds = f" <small>{len(method.runs)} seeds</small>" if len(method.runs) > 1 else ""
    mark = swatch(method.style) if method.counted else ""
    head = f'<th scope="row">{mark}{escape(method.label)}{seeds}</th>'
    return f"<tr>{head}{_cells(groups)}{_endings(method)}</tr>"


def _endings(method: Method) -> str:
    """How the runs ended, each way once, with the number of runs where there are several ways."""
    ways: dict[tuple[str, str], int] = {}
    for run in method.runs:
        ways[run.state, run.ending] = ways.get((run.state, run.ending), 0) + 1
    sentences = [
        f'<span class="{state}">{f"{count} × " if len(ways) > 1 else ""}{escape(ending)}</span>'
        for (state, ending), count in ways.items()
    ]
    return f'<td class="text">{"; ".join(sentences)}</td>'


def _cell(found: Spread | None, text: Callable[[float], str]) -> str:
    return NOTHING if found is None else text(found.middle)


def _with_range(found: Spread | None, text: Callable[[float], str]) -> str:
    if found is None or (low := text(found.low)) == (high := text(found.high)):
        return _cell(found, text)
    return f"{_cell(found, text)}<small>{low} – {high}</small>"


def _time(seconds: float) -> str:
    return duration(seconds) if is_number(seconds) else NOT_REACHED


def published_table(comparison: Comparison) -> str:
    """What has been published about the problem; empty where there is nothing."""
    if not comparison.published:
        return ""
    with_time = any(is_number(row.get("time")) for row in comparison.published)
    columns = [*SPLITS, "time relative to HF"] if with_time else [*SPLITS]
    head = "".join(f'<th scope="col">{column}</th>' for column in ("Method", *columns))
    rows = "".join(_published_row(row, comparison.unit, with_time) for row in comparison.published)
    return scrolling(
        "Published results",
        f'<table class="published"><thead><tr>{head}<th scope="col" class="text">Source</th></tr>'
        f"</thead><tbody>{rows}</tbody></table>",
    )


def _published_row(row: dict[str, Any], unit: str, with_time: bool) -> str:
    cells = [given(row.get(split), unit) for split in SPLITS]
    cells += [given(row.get("time"), "")] if with_time else []
    head = f'<th scope="row">{escape(str(row.get("method", "")))}</th>'
    source = f'<td class="text">{escape(str(row.get("source", "")))}</td>'
    return f"<tr>{head}{_cells([cells])}{source}</tr>"


def terms_table(methods: Iterable[Method]) -> str:
    """The terms of an objective at the last step of each method's first run; empty without any."""
    found = [
        (method.style, *there)
        for method in methods
        if (there := method.first_with(lambda run: run.rows[-1].get("terms")))
    ]
    names = list(dict.fromkeys(name for _, _, terms in found for name in terms))
    if not names:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{swatch(style)}{escape(label)}</th>'
        + "".join(f"<td>{plain(terms.get(name))}</td>" for name in names)
        + "</tr>"
        for style, label, terms in found
    )
    note = (
        '<p class="note">The mean of each term over its points at the start of the last step, '
        "without its weight.</p>"
    )
    table = f'<thead><tr><th scope="col">Run</th>{head}</tr></thead><tbody>{rows}</tbody>'
    return scrolling("Terms", f'<table class="results">{table}</table>') + note


def scrolling(name: str, table: str) -> str:
    """A table wider than the screen scrolls by itself, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{table}</div>'


def _over(groups: Columns) -> str:
    return "".join(
        f'<th scope="colgroup" colspan="{len(columns)}">{escape(title)}</th>'
        for title, columns in groups
    )


def _under(groups: Columns) -> str:
    return "".join(
        f'<th scope="col"{_first(i == 0)}>{column}</th>'
        for _, columns in groups
        for i, column in enumerate(columns)
    )


def _cells(groups: list[list[str]]) -> str:
    return "".join(
        f"<td{_first(i == 0)}>{text}</td>" for group in groups for i, text in enumerate(group)
    )


def _first(first: bool) -> str:
    return ' class="first"' if first else ""
