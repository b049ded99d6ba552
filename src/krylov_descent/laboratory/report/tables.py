"""The tables: results beside the published numbers, time by phase, settings."""

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from krylov_descent.laboratory.record import Row
from krylov_descent.laboratory.report.charts import SPLITS
from krylov_descent.laboratory.report.marks import swatch
from krylov_descent.laboratory.report.numbers import (
    NOTHING,
    duration,
    error,
    is_number,
    plain,
    published,
)
from krylov_descent.laboratory.report.runs import Comparison, Run

# A phase narrower than this has no room for its name in the bar; the line below has it.
NARROW = 0.12
# A phase is shown from this share on, and so is the time that no shown phase counts.
REST, NEGLIGIBLE = "between phases", 0.005
PHASE_COLOURS = 5  # of page.css
# What an iteration costs: one of it, and more.
COUNTS = {
    "evaluations": ("evaluation", "evaluations"),
    "products": ("product", "products"),
    "passes": ("pass over the data", "passes over the data"),
}


def results_table(comparison: Comparison) -> str:
    """One row per run and per published result."""
    reference = comparison.reference
    with_times = reference is not None or any(
        is_number(row.get("time")) for row in comparison.published
    )
    name = "HF" if reference is None else reference.label
    groups = [
        ("At the best validation error", SPLITS),
        ("At the end", SPLITS),
        ("To the end", ("time", "iterations", "passes")),
        *(
            [(f"Time relative to {name}", ("in\u00a0all", "to the same error"))]
            if with_times
            else []
        ),
    ]
    over = "".join(
        f'<th scope="colgroup" colspan="{len(columns)}">{escape(title)}</th>'
        for title, columns in groups
    )
    under = "".join(
        f'<th scope="col"{_first(i == 0)}>{column}</th>'
        for _, columns in groups
        for i, column in enumerate(columns)
    )
    runs = "".join(
        _run_row(comparison, index, run, with_times) for index, run in enumerate(comparison.runs)
    )
    known = "".join(_published_row(comparison, row, with_times) for row in comparison.published)
    width = 2 + sum(len(columns) for _, columns in groups)
    if known:
        heading = f'<th colspan="{width}" scope="colgroup"><span>Published</span></th>'
        known = f'<tbody class="published"><tr>{heading}</tr>{known}</tbody>'
    return _scrolling(
        "Results",
        f'<table class="results"><thead><tr><th rowspan="2" scope="col">Run</th>{over}'
        f'<th rowspan="2" scope="col" class="text">How it ended</th></tr><tr>{under}</tr></thead>'
        f"<tbody>{runs}</tbody>{known}</table>",
    )


def _run_row(comparison: Comparison, index: int, run: Run, with_times: bool) -> str:
    best, last = run.best or {}, run.last or {}
    won = bool(comparison.measured) and _test(run) == _test(comparison.measured[0])
    cells = [
        *(_error(best, split, comparison.unit) for split in SPLITS),
        *(_error(last, split, comparison.unit) for split in SPLITS),
        duration(last.get("seconds")),
        plain(last.get("iteration")),
        plain(last.get("passes")),
    ]
    if won and len(comparison.measured) > 1:
        cells[2] = f"<strong>{cells[2]}</strong>"
    if with_times:
        cells.append(plain(comparison.relative_total(run)))
        cells.append(plain(comparison.relative_to_same_error(run)))
    head = f'<th scope="row">{swatch(index) if run.rows else ""}{escape(run.label)}</th>'
    ending = f'<td class="text"><span class="{run.state}">{escape(run.ending)}</span></td>'
    return f"<tr>{head}{_cells(cells)}{ending}</tr>"


def _published_row(comparison: Comparison, row: dict[str, Any], with_times: bool) -> str:
    cells = [published(row.get(split), comparison.unit) for split in SPLITS] + 6 * [NOTHING]
    if with_times:
        cells += [published(row.get("time"), ""), NOTHING]
    head = f'<th scope="row">{escape(str(row.get("method", "")))}</th>'
    source = f'<td class="text">{escape(str(row.get("source", "")))}</td>'
    return f"<tr>{head}{_cells(cells)}{source}</tr>"


def terms_table(runs: list[Run]) -> str:
    """The terms of each run's objective at its last step; empty where there are none."""
    found = [(i, run, run.rows[-1]["terms"]) for i, run in enumerate(runs) if _has_terms(run)]
    names = list(dict.fromkeys(name for _, _, terms in found for name in terms))
    if not names:
        return ""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{swatch(i)}{escape(run.label)}</th>'
        + "".join(f"<td>{plain(terms.get(name))}</td>" for name in names)
        + "</tr>"
        for i, run, terms in found
    )
    note = (
        '<p class="note">The mean of each term over its points at the start of the last step, '
        "without its weight.</p>"
    )
    table = f'<thead><tr><th scope="col">Run</th>{head}</tr></thead><tbody>{rows}</tbody>'
    return _scrolling("Terms", f'<table class="results">{table}</table>') + note


def _has_terms(run: Run) -> bool:
    return bool(run.rows) and isinstance(run.rows[-1].get("terms"), dict)


def time_bars(runs: Iterable[Run]) -> str:
    """Where each run's time went: a bar of its phases, and what one iteration cost."""
    counted = [(run, phases) for run in runs if (phases := _phases(run))]
    names = [name for _, phases in counted for name in phases if name != REST]
    names = list(dict.fromkeys(names))
    bars = []
    for run, phases in counted:
        total = sum(phases.values())
        parts = "".join(
            f'<span class="{_phase_style(names, name)}" style="flex-grow:{seconds / total:.4f}" '
            f'title="{escape(name)}: {duration(seconds)}">'
            f"{escape(name) if seconds / total > NARROW else ''}</span>"
            for name, seconds in phases.items()
        )
        words = ", ".join(
            f"{name} {duration(seconds)} ({seconds / total:.0%})"
            for name, seconds in phases.items()
        )
        bars.append(
            f"<li><p><b>{escape(run.label)}</b> {duration(total)}</p>"
            f'<div class="bar" aria-hidden="true">{parts}</div>'
            f"<p><small>{escape(words)}. {escape(_cost_of_an_iteration(run))}</small></p></li>"
        )
    return f'<ul class="bars">{"".join(bars)}</ul>' if bars else ""


def _phase_style(names: list[str], name: str) -> str:
    return "phase-rest" if name == REST else f"phase-{names.index(name) % PHASE_COLOURS}"


def _phases(run: Run) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for row in run.rows:
        for name, value in (row.get("phases") or {}).items():
            if is_number(value) and value > 0:
                seconds[name] = seconds.get(name, 0.0) + value
    total = float(run.last.get("seconds", 0.0)) if run.last else 0.0
    shown = {name: value for name, value in seconds.items() if value > NEGLIGIBLE * total}
    rest = total - sum(shown.values())
    return shown | ({REST: rest} if shown and rest > NEGLIGIBLE * total else {})


def _cost_of_an_iteration(run: Run) -> str:
    steps = run.rows[1:]  # the first row is the start, before any step
    if not steps:
        return ""
    counts = [
        _counted(sum(row.get(key) or 0 for row in steps) / len(steps), key)
        for key in ("evaluations", "products")
        if any(row.get(key) for row in steps)
    ]
    passes = _counted(steps[-1]["passes"] / len(steps), "passes")
    per_step = [duration(steps[-1]["seconds"] / len(steps)), *counts, passes]
    return f"One iteration on average: {', '.join(per_step)}."


def _counted(value: float, key: str) -> str:
    one, more = COUNTS[key]
    return f"{plain(value)} {one if value == 1 else more}"


def settings_table(runs: list[Run]) -> str:
    """What was set and where it ran, for each run."""
    there = [run for run in runs if run.config]
    settings = [_flat(run) for run in there]
    keys = list(dict.fromkeys(key for setting in settings for key in setting))
    groups = list(dict.fromkeys(key.partition(":")[0] for key in keys))
    keys.sort(key=lambda key: groups.index(key.partition(":")[0]))
    head = "".join(f'<th scope="col">{escape(run.label)}</th>' for run in there)
    body = []
    for key in keys:
        values = (setting.get(key, NOTHING) for setting in settings)
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        body.append(f'<tr><th scope="row">{escape(key)}</th>{cells}</tr>')
    return _scrolling(
        "Settings and environment",
        f'<table class="settings"><thead><tr><th scope="col">Setting</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table>",
    )


def _flat(run: Run) -> dict[str, str]:
    """The configuration as one level of names and texts; what is None was not set."""
    shown = {"problem", "optimizer", "command"}
    nested = {
        "problem": run.problem.get("options") or {},
        "optimiser": run.optimizer.get("options") or {},
        **{key: value for key, value in run.config.items() if key not in shown},
    }
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= {f"{key}: {name}": _text(item) for name, item in value.items()}
        else:
            flat[key] = _text(value)
    return {key: value for key, value in flat.items() if value != "null"}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _error(row: Row, split: str, unit: str) -> str:
    return error(row.get(split), unit)


def _test(run: Run) -> float | None:
    value = (run.best or {}).get("test")
    return value if is_number(value) else None


def _cells(texts: list[str]) -> str:
    return "".join(f"<td{_first(i % 3 == 0)}>{text}</td>" for i, text in enumerate(texts))


def _first(first: bool) -> str:
    return ' class="first"' if first else ""


def _scrolling(name: str, table: str) -> str:
    """A table wider than the screen scrolls by itself, also by keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{table}</div>'
