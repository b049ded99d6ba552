"""What the report knows of a run.

A report is asked for at any moment, so a run may be finished, unfinished, without a first row, or
not there at all, and its files may be damaged. What there is, is shown, and the state is named.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.report.numbers import is_number

INTERRUPTED = "interrupted"


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
    def settings(self) -> dict[str, object]:
        """What tells it from other runs of its optimiser: options, device, precision and seed."""
        options = self.optimizer.get("options") or {}
        return {**options, **{key: self.config.get(key) for key in ("seed", "device", "dtype")}}

    def seconds_to(self, error: float, split: str) -> float | None:
        """Seconds until an error was first at or below a level; None if it never was."""
        for row in self.rows:
            if is_number(row.get(split)) and row[split] <= error:
                return float(row["seconds"])
        return None


def is_waiting(outcome: dict[str, Any] | None) -> bool:
    """Whether the run has something left to do."""
    return outcome is None or outcome.get("ending") == INTERRUPTED
