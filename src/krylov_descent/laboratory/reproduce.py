"""The paper's Table 2 and figures as cells: runs that are made once and then kept.

A cell is one run with fixed settings. A line of a table has a cell for each of three seeds, or of
ten splits where data are few, and shows their mean. A cell's folder holds what every run folder
holds; what is there already is not made again, so that a table can be filled over several sittings
and on several machines. What is not there is shown as missing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from krylov_descent.laboratory import sequence_exhibit
from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.contenders import PAPER as KSD_PAPER
from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems import speech, starcraft
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.yardsticks import YARDSTICKS

HF, DEFAULTS = "HF", "KSD, defaults"
PAPER = "KSD, paper's settings"
SEEDS = 3
# Its curvature products in tf32, as KSD's. Its gradient stays in float32.
HF_SETTINGS: dict[str, Any] = {"tf32": True}
# The paper's table says 5 units; a curve through three points has six degrees of freedom, and the
# other papers have 6.
CURVES_CODE_6 = "curves-code-6"
# The paper's number of inputs speaks for both players' events, the validation error for one's.
STARCRAFT_OPPONENT = "starcraft-opponent"
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    CURVES_CODE_6: ("curves", {"code_size": 6}),
    STARCRAFT_OPPONENT: (starcraft.NAME, {"observed": "opponent"}),
}
# The paper's problems but for StarCraft, which is repeated over splits.
ROWS = (
    "curves",
    CURVES_CODE_6,
    "mnist-autoencoder",
    "mnist-classifier",
    "mnist-classifier-pretrained",
    speech.NAME,
)
QUICK_SECONDS = 20.0
QUICK_SPLITS = 2
# A run that has not stopped by itself after so long is shown as it is then.
LONGEST_SECONDS = 600.0
# Problems that are stopped otherwise. A pass over the frames of speech is long, and their error
# falls from the first one on; so does that of StarCraft's shallow net. On MNIST's images no method
# sits on a plateau, as HF does on CURVES.
PROBLEM_LIMITS = {
    "mnist-autoencoder": Limits(seconds=LONGEST_SECONDS, fewest_passes=250.0),
    speech.NAME: Limits(seconds=300.0, fewest_passes=100.0),
    starcraft.NAME: Limits(seconds=LONGEST_SECONDS, fewest_passes=250.0),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a table or figure.

    Attributes:
        row: a problem, or a form of one.
        column: what is run on it.
        settings: of the run.
        split: of the data, where the row is repeated over several.
    """

    row: str
    column: str
    settings: RunSettings
    split: int | None = None

    @property
    def title(self) -> str:
        """What it is called while it runs."""
        return ", ".join(filter(None, (self.row, self.column, self._repeat)))

    def folder(self, base: Path) -> RunFolder:
        """Where its run is kept."""
        name = self.column.replace(",", "").replace("'", "").replace(" ", "-").lower()
        return RunFolder(base / self.row / f"{name} {self._repeat}".strip().replace(" ", "-"))

    @property
    def _repeat(self) -> str:
        """Its split, or its seed if that is not the first; empty for the first seed."""
        if self.split is not None:
            return f"split {self.split}"
        return f"seed {self.settings.seed}" if self.settings.seed else ""


@dataclass(frozen=True, kw_only=True)
class Exhibit:
    """A table or figure of the paper, as the cells it is made of."""

    name: str
    title: str
    cells: tuple[Cell, ...] = field(repr=False)

    @property
    def rows(self) -> list[str]:
        """The problems, or forms of one, that it is about."""
        return list(dict.fromkeys(cell.row for cell in self.cells))

    def adapted(self, device: str, quick: bool) -> "Exhibit":
        """The same on a device, in the small form with one seed or two splits if it is to be quick.

        The small forms have no settings in the paper.
        """
        cells = [replace(c, settings=replace(c.settings, device=device)) for c in self.cells]
        if not quick:
            return replace(self, cells=tuple(cells))
        return replace(
            self,
            title=f"{self.title}, small forms with {QUICK_SECONDS:g} s a run",
            cells=tuple(_quick(cell) for cell in cells if _has_quick_form(cell)),
        )

    def only(self, rows: Iterable[str]) -> "Exhibit":
        """The same with some of its rows."""
        return replace(self, cells=tuple(self.of_rows(rows)))

    def of_rows(self, rows: Iterable[str]) -> list[Cell]:
        """The cells of some rows; an unknown one is answered with the nearest."""
        wanted = list(rows)
        for row in wanted:
            if row not in self.rows:
                raise unknown_name(f"row of {self.name}", row, self.rows)
        return [cell for cell in self.cells if cell.row in wanted]


def _has_quick_form(cell: Cell) -> bool:
    of_full_form = cell.column == PAPER or cell.settings.seed > 0
    return not of_full_form and (cell.split is None or cell.split < QUICK_SPLITS)


def _quick(cell: Cell) -> Cell:
    """The cell with the small form of its problem."""
    settings = cell.settings
    return replace(
        cell,
        settings=replace(
            settings,
            optimizer="ksd" if settings.optimizer == KSD_PAPER else settings.optimizer,
            problem_options={**settings.problem_options, "size": "small"},
            limits=replace(settings.limits, seconds=QUICK_SECONDS),
        ),
    )


def _cell(row: str, column: str, optimizer: str, **options: Any) -> Cell:
    problem, problem_options = FORMS.get(row, (row, {}))
    return Cell(
        row=row,
        column=column,
        settings=RunSettings(
            problem=problem,
            problem_options=problem_options,
            optimizer=optimizer,
            optimizer_options=options,
            limits=PROBLEM_LIMITS.get(problem, Limits(seconds=LONGEST_SECONDS)),
        ),
    )


def _table2() -> Iterator[Cell]:
    for row in ROWS:
        for seed in range(SEEDS):
            for cell in _row(row):
                yield replace(cell, settings=replace(cell.settings, seed=seed))
    for row in (starcraft.NAME, STARCRAFT_OPPONENT):
        yield from _starcraft(row)


def _row(row: str) -> Iterator[Cell]:
    """A run of each method."""
    yield _cell(row, HF, "hf", **HF_SETTINGS)
    yield _cell(row, DEFAULTS, "ksd")
    yield _cell(row, PAPER, "ksd-paper")


def _starcraft(row: str) -> Iterator[Cell]:
    """Each method on ten splits: the hundred games of one test set are few."""
    columns = {HF: "hf", DEFAULTS: "ksd", PAPER: "ksd-paper", "L-BFGS": "lbfgs"}
    columns |= {yardstick.title: name for name, yardstick in YARDSTICKS.items()}
    for split in range(starcraft.SPLITS):
        for column, optimizer in columns.items():
            cell = _cell(row, column, optimizer, **(HF_SETTINGS if column == HF else {}))
            options = {**cell.settings.problem_options, "split": split}
            settings = replace(cell.settings, problem_options=options)
            yield replace(cell, settings=settings, split=split)


def _figure(row: str) -> Iterator[Cell]:
    """The paper's convergence curves: both methods with both matrices, and L-BFGS.

    Those with the Gauss-Newton matrix are Table 2's own runs.
    """
    yield _cell(row, DEFAULTS, "ksd")
    yield _cell(row, PAPER, "ksd-paper")
    yield _cell(row, "KSD, Hessian", "ksd-paper", curvature="hessian")
    yield _cell(row, HF, "hf", **HF_SETTINGS)
    yield _cell(row, "HF, Hessian", "hf", curvature="hessian", **HF_SETTINGS)
    yield _cell(row, "L-BFGS", "lbfgs")


EXHIBITS: dict[str, Exhibit] = {
    exhibit.name: exhibit
    for exhibit in (
        Exhibit(name="table2", title="Table 2 of the paper", cells=tuple(_table2())),
        Exhibit(
            name="figure1",
            title="Figure 1 of the paper: noisy spoken digits",
            cells=(*_figure(speech.NAME), _cell(speech.NAME, "SGD", "sgd")),
        ),
        Exhibit(
            name="figure2",
            title="Figure 2 of the paper: CURVES",
            cells=tuple(_figure("curves")),
        ),
        Exhibit(
            name=sequence_exhibit.NAME,
            title=sequence_exhibit.TITLE,
            cells=tuple(
                Cell(row=row, column=column, settings=settings)
                for row, column, settings in sequence_exhibit.sequence_runs()
            ),
        ),
    )
}


def exhibit(name: str) -> Exhibit:
    """The table or figure of a name; an unknown one is answered with the nearest."""
    if name not in EXHIBITS:
        raise unknown_name("exhibit", name, EXHIBITS)
    return EXHIBITS[name]


def by_line(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    """The cells of each line of a table, by row and column: one for each seed or split."""
    lines: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        lines.setdefault((cell.row, cell.column), []).append(cell)
    return lines
