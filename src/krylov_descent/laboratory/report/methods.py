"""Runs that differ in nothing but their seed, as one method with a spread."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonpath
from typing import TypeVar

from krylov_descent.laboratory.report.marks import curve_styles
from krylov_descent.laboratory.report.runs import Run

# The error that methods are compared by.
RESULT = "test"
# A run that ends with more than this share of its first error has not learnt.
NOT_LEARNT = 0.5
Kind = TypeVar("Kind")


@dataclass(frozen=True, order=True)
class Spread:
    """A number of several runs: median, lowest and highest; ∞ stands for one that is not finite.

    Of an even number of runs the median is the higher of the two in the middle.
    """

    middle: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median and range of what there is; None where there is nothing."""
    found = [value if math.isfinite(value) else math.inf for value in values if value is not None]
    if not found:
        return None
    return Spread(statistics.median_high(found), min(found), max(found), len(found))


@dataclass(frozen=True, kw_only=True)
class Method:
    """Runs of one optimiser with the same settings, one for each seed.

    Attributes:
        label: unique among the methods of a problem.
        style: the classes of its colour and dash pattern.
        runs: in the order of their seeds.
    """

    label: str
    style: str
    runs: list[Run]

    @cached_property
    def counted(self) -> list[Run]:
        """The runs that its numbers are of: those that have ended, or all while none has."""
        there = [run for run in self.runs if run.rows]
        return [run for run in there if run.state == "finished"] or there

    @cached_property
    def result(self) -> Spread | None:
        """The test error where the validation error was lowest."""
        return self.best(RESULT)

    @property
    def rank(self) -> tuple[float, float]:
        """What methods are sorted by, the best first; those without a result come last."""
        return (self.result.middle, self.result.low) if self.result else (math.inf, math.inf)

    @property
    def has_learnt(self) -> bool:
        """Whether its error fell by half at least."""
        firsts = [run.rows[0].get(RESULT) for run in self.counted if len(run.rows) > 1]
        start = spread(firsts)
        return bool(start and self.result and self.result.middle <= NOT_LEARNT * start.middle)

    def best(self, split: str) -> Spread | None:
        """An error where the validation error was lowest."""
        return spread((run.best or {}).get(split) for run in self.counted)

    def last(self, key: str) -> Spread | None:
        """A number of the last iteration."""
        return spread((run.last or {}).get(key) for run in self.counted)

    def seconds_to(self, error: float) -> Spread | None:
        """Seconds to a test error; ∞ for runs that did not get there."""
        times = [run.seconds_to(error, RESULT) for run in self.counted]
        return spread(math.inf if time is None else time for time in times)

    def first_with(self, found: Callable[[Run], Kind | None]) -> tuple[str, Kind] | None:
        """What is found in the first run that has it, and the run's name: one stands for all."""
        for run in self.counted:
            if (thing := found(run)) is not None:
                alone = len(self.runs) == 1
                name = self.label if alone else f"{self.label}, seed {run.config.get('seed')}"
                return name, thing
        return None

    def one_by_one(self) -> "list[Method]":
        """Each run as a method of its own."""
        return [replace(self, label=run.label, runs=[run]) for run in self.runs]


def methods_of(runs: Sequence[Run]) -> list[Method]:
    """Put runs that differ in their seed alone together, the best method first.

    Each run is named by its optimiser, and where several share it, by what differs between them.
    """
    groups: list[list[Run]] = []
    for run in runs:
        mine = next((group for group in groups if _is_another_seed(run, group)), None)
        groups.append([run]) if mine is None else mine.append(run)
    for group in groups:
        group.sort(key=lambda run: run.config.get("seed") or 0)
    labels = [_label(group, groups) for group in groups]
    names = [str(group[0].optimizer.get("name", "")) for group in groups]
    methods = [
        Method(label=label, style=style, runs=[_named(run, label, group) for run in group])
        for label, style, group in zip(labels, curve_styles(names), groups, strict=True)
    ]
    return sorted(methods, key=lambda method: method.rank)


def _is_another_seed(run: Run, group: list[Run]) -> bool:
    seeds = [other.config.get("seed") for other in group]
    first = group[0]
    return (
        bool(run.config)
        and run.title == first.title
        and {**run.settings, "seed": None} == {**first.settings, "seed": None}
        and run.config.get("seed") not in seeds
    )


def _label(group: list[Run], groups: list[list[Run]]) -> str:
    run = group[0]
    namesakes = [other[0] for other in groups if other[0].title == run.title]
    differing = [
        f"{key} {value}"
        for key, value in run.settings.items()
        if any(other.settings.get(key) != value for other in namesakes)
    ]
    label = run.title + (f" ({', '.join(differing)})" if differing else "")
    if sum(other.settings == run.settings for other in namesakes) > 1:
        paths = [other.folder.path.absolute() for other in namesakes]
        label += f" in {run.folder.path.absolute().relative_to(commonpath(paths))}"
    return label


def _named(run: Run, label: str, group: list[Run]) -> Run:
    seed = f", seed {run.config.get('seed')}" if len(group) > 1 else ""
    return replace(run, label=label + seed)
