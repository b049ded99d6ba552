"""The live lines of a run: where it is, how it goes, and how long it will take."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems.problem import Metric
from krylov_descent.laboratory.rbm import PretrainingEpoch
from krylov_descent.laboratory.record import Row
from krylov_descent.laboratory.waiting import clock
from krylov_descent.optimizers.result import StepResult

GAP = 2
# What a narrow terminal does without, the first to go first.
LEAST = ("evals", "rank", "loss", "validation", "time", "iteration")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which of several runs it is.

    Attributes:
        number: of the run, from 1.
        count: of all runs.
        seconds_after: the time limits of those after it; None where one has none.
    """

    number: int = 1
    count: int = 1
    seconds_after: float | None = 0.0


def places(limits: Sequence[Limits]) -> list[Place]:
    """The places of runs that follow one another, from the limits of each."""
    found = []
    for number in range(1, len(limits) + 1):
        after = [limit.seconds for limit in limits[number:]]
        known = [seconds for seconds in after if seconds is not None]
        left = sum(known) if len(known) == len(after) else None
        found.append(Place(number=number, count=len(limits), seconds_after=left))
    return found


class LiveLine:
    """Shows the latest row of a run in place, with a clock; in a log, a line now and then.

    Without a terminal there is a line for the first row and for the last, and one for each
    `LOG_SECONDS` between them.

    Args:
        console: where to write.
        title: the run's name, which begins with the optimiser's.
        metric: how errors are written.
        limits: for the time left.
        place: among several runs.
        compiles: whether the first step waits for a compiler.
    """

    LOG_SECONDS = 10.0

    def __init__(
        self,
        console: Console,
        title: str,
        metric: Metric,
        limits: Limits,
        place: Place | None = None,
        *,
        compiles: bool = False,
    ) -> None:
        self._console, self._title = console, title
        self._metric, self._limits = metric, limits
        self._place, self._compiles = place or Place(), compiles
        self._logged: float | None = None
        self._waiting: str | None = None
        self._phase: Callable[[], str] = lambda: "preparing"
        self._iteration, self._cells = -1, dict[str, str]()
        self._since = time.monotonic()
        self._live = Live(get_renderable=self._picture, console=console, transient=False)

    def __enter__(self) -> "LiveLine":
        if self._console.is_terminal:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._phase = lambda: ""
            self._live.stop()
        elif self._waiting is not None:
            self._print(self._waiting)

    def watch(self, phase: Callable[[], str]) -> None:
        """Ask from now on for what is being done: "step", a phase of it, or something else."""
        self._phase = phase

    def pretraining(self, epoch: PretrainingEpoch) -> None:
        """Show an epoch of pretraining."""
        text = f"pretraining {epoch}"
        self._phase = lambda: text
        self._log(f"{self._title}: {text}")

    def row(self, row: Row, result: StepResult | None) -> None:
        """Show an iteration."""
        self._iteration, self._cells = row["iteration"], self._texts(row, result)
        self._since = time.monotonic()
        words = ", ".join(f"{heading} {text}" for heading, text in self._cells.items())
        self._log(f"{self._title}: {words}")

    # On a terminal --------------------------------------------------------------------------

    def _picture(self) -> RenderableType:
        lines = [Text(self._title, no_wrap=True, overflow="ellipsis")]
        if doing := self._doing():
            lines.append(Text(doing, no_wrap=True, overflow="ellipsis"))
        if not self._cells:
            return Group(*lines)
        columns = {heading: [text] for heading, text in self._cells.items()}
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for heading in fitting(columns, LEAST, self._console.width, GAP):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_row(*(self._cells[str(column.header)] for column in table.columns))
        return Group(*lines, table)

    def _doing(self) -> str:
        """What is being done, for how long, and which of several runs it is done for."""
        phase = self._phase()
        if not phase:
            return ""
        words = [f"run {self._place.number} of {self._place.count}"]
        if self._iteration >= 0:
            words.append(f"step {self._iteration + 1}")
        if self._iteration == 0 and self._compiles:
            words.append("compiling")
        words += [phase] if phase != "step" else []
        waited = clock(time.monotonic() - self._since)
        return f"{', '.join(words if self._place.count > 1 else words[1:])}: {waited}"

    def _texts(self, row: Row, result: StepResult | None) -> dict[str, str]:
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
        left, after = self._seconds_left(row), self._place.seconds_after
        if left is not None:
            cells["left"] = clock(left)
        if left is not None and after:
            cells["all runs"] = clock(left + after)
        return cells

    def _seconds_left(self, row: Row) -> float | None:
        """Until the nearest limit, at the pace so far; early stopping may come before."""
        if not row["seconds"]:
            return self._limits.seconds
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

    # In a log -------------------------------------------------------------------------------

    def _log(self, line: str) -> None:
        if self._console.is_terminal:
            return
        self._waiting = line
        if self._logged is None or time.monotonic() - self._logged > self.LOG_SECONDS:
            self._print(line)

    def _print(self, line: str) -> None:
        self._logged, self._waiting = time.monotonic(), None
        self._console.print(line, highlight=False, soft_wrap=True)


def fitting(
    columns: Mapping[str, Sequence[str]], least: Sequence[str], width: int, gap: int
) -> list[str]:
    """The headings of the columns that have room beside each other.

    Args:
        columns: the texts below each heading.
        least: headings that a narrow terminal does without, the first to go first.
        width: of the terminal.
        gap: between two columns.
    """
    kept = list(columns)
    widths = {h: max(len(h), *(len(text) for text in columns[h])) + gap for h in kept}
    for heading in least:
        if sum(widths[h] for h in kept) - gap <= width:
            break
        kept = [h for h in kept if h != heading]
    return kept
