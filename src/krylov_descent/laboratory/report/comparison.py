"""The runs of one problem side by side, and the error that the time is counted to."""

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from krylov_descent.laboratory.report.methods import Method, methods_of
from krylov_descent.laboratory.report.runs import Run


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The runs of one problem, and what has been published about it.

    Attributes:
        title: of the problem.
        form: the options that tell it from others of its title; empty for the only one.
        metric: what its errors are.
        unit: of the metric, "" or "%".
        published: rows of results.
        methods: the runs by method, the best method first.
        target: the test error that the time is counted to; None where nothing was learnt, or there
            is nothing to compare.
    """

    title: str
    form: str = ""
    metric: str
    unit: str
    published: list[dict[str, Any]]
    methods: list[Method]
    target: float | None

    @property
    def heading(self) -> str:
        """Its title, unique on the page."""
        return f"{self.title}: {self.form}" if self.form else self.title

    @property
    def runs(self) -> list[Run]:
        """All runs, method by method."""
        return [run for method in self.methods for run in method.runs]

    @property
    def measured(self) -> list[Method]:
        """Methods with a test error, the best first."""
        return [method for method in self.methods if method.result]


def compare(runs: Iterable[Run], target: float | None = None) -> list[Comparison]:
    """Put runs of one problem together, problems in the order of their first run.

    Runs without configuration do not say what they were of: they go with the only problem there
    is, else into a comparison of their own at the end, which has no metric.

    Args:
        runs: of one problem or several.
        target: the test error that the time is counted to, for a single problem; by default the
            error that half of the methods reach.

    Raises:
        ValueError: a target for several problems.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        of = {key: run.problem.get(key) for key in ("name", "title", "options")}
        groups.setdefault(json.dumps(of) if run.config else "", []).append(run)
    if target is not None and len(groups.keys() - {""}) > 1:
        raise ValueError(
            f"`target` is an error of one problem, and the runs are of {len(groups.keys() - {''})}"
            ": write a page for each problem, or leave it out"
        )
    lost = groups.pop("", [])
    if len(groups) == 1:
        next(iter(groups.values())).extend(lost)
    elif lost:
        groups[""] = lost
    return _told_apart([_comparison(group, target) for group in groups.values()])


def _comparison(runs: list[Run], target: float | None) -> Comparison:
    problem = runs[0].problem
    metric = problem.get("metric", {})
    methods = methods_of(runs)
    return Comparison(
        title=str(problem.get("title") or problem.get("name") or "Missing runs"),
        metric=str(metric.get("name", "error")),
        unit=str(metric.get("unit", "")),
        published=list(problem.get("published") or []),
        methods=methods,
        target=_reached_by_half(methods) if target is None else target,
    )


def _reached_by_half(methods: list[Method]) -> float | None:
    """An error with two digits that half of the methods reach; None with nothing to compare.

    A method that did not learn has an error that the others pass at their first steps.
    """
    if sum(method.result is not None for method in methods) < 2:
        return None
    learnt = [m.result.middle for m in methods if m.result and m.has_learnt]
    return _rounded_up(statistics.median_high(learnt)) if learnt else None


def _rounded_up(value: float) -> float:
    """The next number with two significant digits."""
    if value <= 0:
        return value
    digit = 10.0 ** (math.floor(math.log10(value)) - 1)
    near = float(f"{value:.2g}")
    return near if near >= value else float(f"{near + digit:.2g}")


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
    options = next((run.problem["options"] for run in comparison.runs if run.config), None) or {}
    return {key: value for key, value in options.items() if value is not None}
