"""What the report knows of a run, and the runs of one problem side by side.

A report is asked for at any moment, so a run may be finished, unfinished, without a first row, or
not there at all, and its files may be damaged. What there is, is shown, and the state is named.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.report.numbers import is_number

# The optimiser that times are relative to, as in the paper's Table 2.
REFERENCE = "hf"
# Endings that the run came to by itself. Where a limit ended it, its time says nothing.
ENDED_BY_ITSELF = ("early_stop", "stuck")
INTERRUPTED = "interrupted"
# A run that ends with more than this share of its first error has not learnt, and the time to such
# an error tells nothing about the other run, which passed it at its first steps.
NOT_LEARNT = 0.5


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder, read.

    Attributes:
        folder: where it lies.
        config: `problem` (name, title, metric with name and unit, options, published), `optimizer`
            (name, title, options), seed, device, dtype, versions, command; empty if missing or
            unreadable.
        rows: one per iteration, from iteration 0.
        outcome: how it ended; None while it has not.
        missing: why there is nothing to show; empty for a run that is there.
        damaged: what is wrong with its record; empty for one that is whole.
        label: what it is called, unique among the runs of its problem.
    """

    folder: RunFolder
    config: dict[str, Any]
    rows: list[Row]
    outcome: dict[str, Any] | None
    missing: str = ""
    damaged: str = ""
    label: str = ""

    @property
    def problem(self) -> dict[str, Any]:
        """What `config` says of the problem."""
        return dict(self.config.get("problem", {}))

    @property
    def optimizer(self) -> dict[str, Any]:
        """What `config` says of the optimiser."""
        return dict(self.config.get("optimizer", {}))

    @property
    def title(self) -> str:
        """The optimiser's name for people; the folder's for a run that is missing."""
        name = self.optimizer.get("title") or self.optimizer.get("name")
        return str(name or self.folder.path.name or self.folder.path)

    @property
    def last(self) -> Row | None:
        """The row of the last iteration; None before the first."""
        return self.rows[-1] if self.rows else None

    @cached_property
    def best(self) -> Row | None:
        """The row of the lowest validation error; the last one where nothing was validated."""
        validated = [row for row in self.rows if is_number(row.get("validation"))]
        return min(validated, key=lambda row: float(row["validation"]), default=self.last)

    @property
    def ending(self) -> str:
        """How it ended, as a sentence without its full stop."""
        if self.missing:
            return self.missing
        if self.damaged:
            return f"damaged: {self.damaged}"
        if self.outcome is not None:
            return str(self.outcome.get("sentence", "it ended"))
        if self.last is None:
            return "not started"
        return f"unfinished, at iteration {self.last['iteration']}"

    @property
    def state(self) -> str:
        """One word: "missing", "damaged", "unfinished" or "finished"."""
        if self.missing:
            return "missing"
        if self.damaged:
            return "damaged"
        return "unfinished" if is_waiting(self.outcome) else "finished"

    @property
    def ended_by_itself(self) -> bool:
        """Whether its total time is its own, and not that of a limit."""
        return (self.outcome or {}).get("ending") in ENDED_BY_ITSELF

    def seconds_to(self, train_error: float) -> float | None:
        """Seconds until the training error was first at or below a level; None if it never was."""
        for row in self.rows:
            if is_number(row.get("train")) and row["train"] <= train_error:
                return float(row["seconds"])
        return None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs of one problem, in the order given, and what has been published about it.

    Attributes:
        title: of the problem.
        form: the options that tell it from others of its title; empty for the only one.
        metric: what its errors are.
        unit: of the metric, "" or "%".
        published: rows of results.
        runs: in the order given.
    """

    title: str
    form: str = ""
    metric: str
    unit: str
    published: list[dict[str, Any]]
    runs: list[Run]

    @property
    def heading(self) -> str:
        """Its title, unique on the page."""
        return f"{self.title}: {self.form}" if self.form else self.title

    @cached_property
    def measured(self) -> list[Run]:
        """Runs with a test error, the best first."""
        there = [run for run in self.runs if run.best and is_number(run.best.get("test"))]
        return sorted(there, key=lambda run: float(run.best["test"]) if run.best else 0.0)

    @property
    def reference(self) -> Run | None:
        """The run that times are relative to; None where HF was not run."""
        found = (run for run in self.runs if run.optimizer.get("name") == REFERENCE and run.rows)
        return next(found, None)

    def relative_total(self, run: Run) -> float | None:
        """Total time relative to HF, each to its own early stop: the paper's measure."""
        other = self.reference
        if other is None or not (run.ended_by_itself and other.ended_by_itself):
            return None
        return _ratio(run.rows[-1]["seconds"], other.rows[-1]["seconds"])

    def relative_to_same_error(self, run: Run) -> float | None:
        """Time to the worse of the two final training errors, relative to HF.

        None where one of them has not learnt, as for `same_error_seconds`.
        """
        times = None if self.reference is None else same_error_seconds(run, self.reference)
        return None if times is None else _ratio(*times[1:])


def same_error_seconds(one: Run, other: Run) -> tuple[float, float, float] | None:
    """The worse of two runs' final training errors, and the seconds of each to reach it.

    None where that level says nothing: one of them has hardly got away from its first error.
    """
    firsts, lasts = (
        [
            float(run.rows[at]["train"])
            for run in (one, other)
            if run.rows and is_number(run.rows[at].get("train"))
        ]
        for at in (0, -1)
    )
    if len(firsts) < 2 or len(lasts) < 2 or max(lasts) > NOT_LEARNT * max(firsts):
        return None
    level = max(lasts)
    times = one.seconds_to(level), other.seconds_to(level)
    return None if times[0] is None or times[1] is None else (level, times[0], times[1])


def compare(runs: Iterable[Run]) -> list[Comparison]:
    """Put runs of one problem together, problems in the order of their first run.

    Runs without configuration do not say what they were of: they go with the only problem there
    is, else into a comparison of their own at the end, which has no metric.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        of = {key: run.problem.get(key) for key in ("name", "title", "options")}
        groups.setdefault(json.dumps(of) if run.config else "", []).append(run)
    lost = groups.pop("", [])
    if len(groups) == 1:
        next(iter(groups.values())).extend(lost)
    elif lost:
        groups[""] = lost
    return _told_apart([_comparison(group) for group in groups.values()])


def _comparison(runs: list[Run]) -> Comparison:
    problem = runs[0].problem
    metric = problem.get("metric", {})
    return Comparison(
        title=str(problem.get("title") or problem.get("name") or "Missing runs"),
        metric=str(metric.get("name", "error")),
        unit=str(metric.get("unit", "")),
        published=list(problem.get("published") or []),
        runs=_labelled(runs),
    )


def _told_apart(comparisons: list[Comparison]) -> list[Comparison]:
    """Name the options that differ between problems of one title."""
    told: list[Comparison] = []
    for comparison in comparisons:
        mine = _problem_options(comparison)
        others = [_problem_options(c) for c in comparisons if c.title == comparison.title]
        differing = [
            f"{key}={value}"
            for key, value in mine.items()
            if any(other.get(key) != value for other in others)
        ]
        told.append(replace(comparison, form=", ".join(differing)))
    return told


def _problem_options(comparison: Comparison) -> dict[str, Any]:
    options = comparison.runs[0].problem.get("options") or {}
    return {key: value for key, value in options.items() if value is not None}


def _labelled(runs: Sequence[Run]) -> list[Run]:
    """Name each run by its optimiser, and where two share it, by what differs between them."""
    labelled: list[Run] = []
    for run in runs:
        namesakes = [other for other in runs if other.title == run.title]
        settings = [_settings(other) for other in namesakes]
        mine = _settings(run)
        differing = [
            f"{key} {value}"
            for key, value in mine.items()
            if any(other.get(key) != value for other in settings)
        ]
        label = run.title + (f" ({', '.join(differing)})" if differing else "")
        if sum(_settings(other) == mine for other in namesakes) > 1:
            label += f" in {run.folder.path.name}"
        labelled.append(replace(run, label=label))
    return labelled


def _settings(run: Run) -> dict[str, object]:
    options = run.optimizer.get("options") or {}
    return {**options, **{key: run.config.get(key) for key in ("seed", "device", "dtype")}}


def is_waiting(outcome: dict[str, Any] | None) -> bool:
    """Whether the run has something left to do."""
    return outcome is None or outcome.get("ending") == INTERRUPTED


def _ratio(seconds: float, reference: float) -> float | None:
    return seconds / reference if reference > 0 else None
