"""The account of a step under way, which ends as a `StepResult`."""

from typing import Any

from krylov_descent.optimizers.base import Stopwatch
from krylov_descent.optimizers.result import Status, StepResult


class Account:
    """Collects what a step found and what it cost; the names are those of `StepResult`."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._numbers: dict[str, Any] = {"passes": 0.0}

    def note(self, **numbers: Any) -> None:
        """Write numbers down; a later one of the same name replaces an earlier one."""
        self._numbers |= numbers

    def count(self, samples: int) -> None:
        """Add samples gone through to the passes over the data, whose size is noted by then."""
        self._numbers["passes"] += samples / self._numbers["samples"]

    def lap(self, phase: str) -> None:
        """Book the time since the last lap on a phase."""
        self._watch.lap(phase)

    def moved(self, reason: str, loss_after: float) -> StepResult:
        """The result of a step that was taken."""
        return self._result(Status.MOVED, reason, loss_after)

    def refused(self, status: Status, reason: str | None = None) -> StepResult:
        """The result of a step that was not."""
        return self._result(status, reason or status.value, None)

    def _result(self, status: Status, reason: str, loss_after: float | None) -> StepResult:
        self._watch.lap("search")
        before = self._numbers.setdefault("loss_before", self._numbers["loss"])
        return StepResult(
            status=status,
            reason=reason,
            loss_after=before if loss_after is None else loss_after,
            seconds=self._watch.seconds,
            **self._numbers,
        )
