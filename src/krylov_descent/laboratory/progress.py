"""The live line of a run: where it is, how it goes, and how long it will take."""

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems.problem import Metric
from krylov_descent.laboratory.rbm import PretrainingEpoch
from krylov_descent.laboratory.record import Row
from krylov_descent.laboratory.waiting import clock
from krylov_descent.optimizers.result import StepResult


class LiveLine:
    """Shows the latest row of a run in place; in a log, a line now and then.

    Without a terminal there is a line for the first row and for the last, and one for each
    `LOG_SECONDS` between them.

    Args:
        console: where to write.
        title: the run's name.
        metric: how errors are written.
        limits: for the time left.
    """

    LOG_SECONDS = 10.0

    def __init__(self, console: Console, title: str, metric: Metric, limits: Limits) -> None:
        self._console, self._title = console, title
        self._metric, self._limits = metric, limits
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._logged: float | None = None
        self._waiting: str | None = None

    def __enter__(self) -> "LiveLine":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        elif self._waiting is not None:
            self._print(self._waiting)

    def pretraining(self, epoch: PretrainingEpoch) -> None:
        """Show an epoch of pretraining."""
        line = f"{self._title}: pretraining {epoch}"
        self._show(line, line)

    def row(self, row: Row, result: StepResult | None) -> None:
        """Show an iteration."""
        cells = self._cells(row, result)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for heading in cells:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_row(*cells.values())
        words = ", ".join(f"{heading} {text}" for heading, text in cells.items())
        self._show(Group(self._title, table), f"{self._title}: {words}")

    def _cells(self, row: Row, result: StepResult | None) -> dict[str, str]:
        cells = {"iteration": str(row["iteration"])}
        if result is not None:
            cells["loss"] = f"{result.loss:.6g}"
        cells["train"] = self._metric.text(row["train"])
        if row["validation"] is not None:
            cells["validation"] = self._metric.text(row["validation"])
        if result is not None and result.rank:
            cells["rank"] = str(result.rank)
        if result is not None and result.evaluations:
            cells["evals"] = str(result.evaluations)
        cells["time"] = clock(row["seconds"])
        if (left := self._seconds_left(row)) is not None:
            cells["left"] = clock(left)
        return cells

    def _seconds_left(self, row: Row) -> float | None:
        """Until the nearest limit, at the pace so far; early stopping may come before."""
        if not row["seconds"]:
            return None
        limits, estimates = self._limits, []
        if limits.seconds is not None:
            estimates.append(limits.seconds - row["seconds"])
        for limit, done in (
            (limits.iterations, row["iteration"]),
            (limits.passes, row["passes"]),
        ):
            if limit is not None and done:
                estimates.append(row["seconds"] * (limit - done) / done)
        return max(0.0, min(estimates)) if estimates else None

    def _show(self, picture: RenderableType, line: str) -> None:
        if self._console.is_terminal:
            self._live.update(picture, refresh=True)
            return
        self._waiting = line
        if self._logged is None or time.monotonic() - self._logged > self.LOG_SECONDS:
            self._print(line)

    def _print(self, line: str) -> None:
        self._logged, self._waiting = time.monotonic(), None
        self._console.print(line, highlight=False, soft_wrap=True)
