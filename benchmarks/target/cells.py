"""Which runs there are, in the order in which they are made."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.environment import UnavailableError
from benchmarks.parts import Section
from benchmarks.records import read
from benchmarks.target.methods import METHODS, Method, methods_of
from krylov_descent.laboratory.reproduce import CURVES_CODE_6

SEEDS = (0, 1, 2)
TUNING_PART = 0.25  # of the budget
KEYS = ("seconds", "passes", "train", "test")  # of a point on a learning curve
# Beyond the seconds of training: errors are measured, the method is warmed up.
OVERHEAD, OVERHEAD_SECONDS = 1.4, 3.0

Stage = Literal["rate", "seed"]


@dataclass(frozen=True, kw_only=True)
class Race:
    """A problem, the errors to be reached, and the time for it.

    Attributes:
        title: what tables call it.
        problem: its name in the laboratory.
        options: of the problem.
        row: of Table 2, whose settings KSD has; None for its defaults.
        train: the training error to reach.
        test: the test error to reach.
        seconds: of training; learning rates fall to 0 over them.
        batch_size: of the first-order methods.
    """

    title: str
    problem: str
    options: dict[str, Any] = field(default_factory=dict)
    row: str | None = None
    train: float
    test: float
    seconds: float
    batch_size: int


# On a GPU the paper's problems. The test errors to reach are the paper's for KSD (Table 2), the
# training errors of the autoencoders those of this project's goals. On a CPU small forms.
SMALL = {"size": "small"}
RACES: dict[str, dict[str, Race]] = {
    "cuda": {
        "curves": Race(
            title="CURVES (re-created, code of 6)",
            problem="curves",
            options={"code_size": 6},
            row=CURVES_CODE_6,
            train=0.1,
            test=0.25,
            seconds=25,
            batch_size=500,
        ),
        "mnist-autoencoder": Race(
            title="MNIST autoencoder",
            problem="mnist-autoencoder",
            row="mnist-autoencoder",
            train=2.0,
            test=2.5,
            seconds=50,
            batch_size=1000,
        ),
        "mnist-classifier": Race(
            title="MNIST classification",
            problem="mnist-classifier",
            row="mnist-classifier",
            train=0.001,
            test=0.017,
            seconds=15,
            batch_size=1000,
        ),
    },
    "cpu": {
        "curves": Race(
            title="CURVES (re-created), small",
            problem="curves",
            options=SMALL,
            train=8.0,
            test=8.5,
            seconds=20,
            batch_size=100,
        ),
        "mnist-autoencoder": Race(
            title="MNIST autoencoder, small",
            problem="mnist-autoencoder",
            options=SMALL,
            train=10.0,
            test=15.0,
            seconds=20,
            batch_size=100,
        ),
        "mnist-classifier": Race(
            title="MNIST classification, small",
            problem="mnist-classifier",
            options=SMALL,
            train=0.001,
            test=0.1,
            seconds=8,
            batch_size=100,
        ),
    },
}
# The goals are about these.
FIRST_RACES = ("curves", "mnist-autoencoder")
FIRST_METHODS = ("ksd", "adam", "ksd-diagonal", "ksd-float32", "adam-tf32", "hf-tf32")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a short one for a learning rate, or a full one."""

    race: str
    method: str
    stage: Stage
    rate: float | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """Also that of its file."""
        ending = f"rate-{self.rate}" if self.stage == "rate" else f"seed-{self.seed}"
        return f"{self.race}.{self.method}.{ending}"

    def seconds(self, race: Race) -> float:
        """Of training, at most."""
        return race.seconds * (TUNING_PART if self.stage == "rate" else 1.0)


@lru_cache
def cells_of(device: str) -> dict[str, Cell]:
    """All cells of a device by name, those that the goals are about first."""
    races = RACES[device]
    first = [race for race in FIRST_RACES if race in races]
    ordered: list[Cell] = []
    methods = methods_of(device)
    for method in FIRST_METHODS:
        for race in first if method in methods else []:
            ordered += _runs(race, method)
    for race in races:
        for method in (name for name, described in methods.items() if described.kind is None):
            ordered += _runs(race, method)
    return {cell.name: cell for cell in ordered}


def _runs(race: str, method: str) -> Iterator[Cell]:
    for rate in METHODS[method].rates if METHODS[method].own_rate else ():
        yield Cell(race=race, method=method, stage="rate", rate=rate)
    for seed in SEEDS:
        yield Cell(race=race, method=method, stage="seed", seed=seed)


def expected_seconds(name: str, device: torch.device) -> float:
    """About how long a cell takes, all told."""
    cell = cells_of(device.type)[name]
    return OVERHEAD * cell.seconds(RACES[device.type][cell.race]) + OVERHEAD_SECONDS


def rate_of(cell: Cell, method: Method, folder: Path) -> float | None:
    """The learning rate to run a cell with: its own, or the best of the short runs.

    Raises:
        UnavailableError: some of the short runs are not there yet.
    """
    if cell.rate is not None or not method.rates:
        return cell.rate
    kind, found = method.kind or cell.method, dict[float, Section]()
    for rate in method.rates:
        short = Cell(race=cell.race, method=kind, stage="rate", rate=rate)
        path = folder / f"{short.name}.json"
        if not path.exists():
            raise UnavailableError(f"its learning rate is not tuned yet: {short.name} is missing")
        found[rate] = read(path)
    return best_rate(found)


def best_rate(runs: dict[float, Section]) -> float:
    """The rate that ended with the lowest training error; of equal ones the fastest to the target.

    Raises:
        UnavailableError: all of them ended in NaN.
    """
    finite = {rate: run for rate, run in runs.items() if run["last"]["train"] is not None}
    if not finite:
        raise UnavailableError("every learning rate of the grid ended in NaN")

    def error_and_time(rate: float) -> tuple[float, float]:
        seconds = finite[rate]["reached"]["train"]
        return finite[rate]["last"]["train"], math.inf if seconds is None else seconds

    return min(finite, key=error_and_time)
