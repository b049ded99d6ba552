"""Which runs there are, in the order in which they are made."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import torch

from benchmarks.target.methods import METHODS, methods_of

SEEDS = (0, 1, 2)
TUNING_SEED = 100  # is none of those that count
# Parts of the budget over which a learning rate falls to 0. Rates are tried with the middle one.
MIDDLE, OTHER_DECAYS = 0.5, (1.0, 0.25)
# Of a method whose rate does not fall: more rates instead, as parts of the best one.
NEAR = (0.7, 1.4)
KEYS = ("seconds", "passes", "train", "test")  # of a point on a learning curve
# Beyond the seconds of training: errors are measured, the method is warmed up, once in a process
# of its own.
OVERHEAD, OVERHEAD_SECONDS, FRESH_PROCESS_SECONDS = 1.3, 2.0, 10.0

Stage = Literal["rate", "decay", "near", "seed"]


@dataclass(frozen=True, kw_only=True)
class Race:
    """A problem, the errors to be reached, and the time for it.

    Attributes:
        title: what tables call it.
        problem: its name in the laboratory.
        options: of the problem.
        train: the training error to reach.
        test: the test error to reach.
        seconds: of training.
        batch_size: of the first-order methods.
    """

    title: str
    problem: str
    options: dict[str, Any] = field(default_factory=dict)
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
            train=0.1,
            test=0.25,
            seconds=25,
            batch_size=500,
        ),
        "mnist-autoencoder": Race(
            title="MNIST autoencoder",
            problem="mnist-autoencoder",
            train=2.0,
            test=2.5,
            seconds=50,
            batch_size=1000,
        ),
        "mnist-classifier": Race(
            title="MNIST classification",
            problem="mnist-classifier",
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
FIRST_METHODS = ("ksd", "adam", "adam-tf32", "hf-tf32")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a try of a setting, or one that counts.

    Attributes:
        race: by name.
        method: by name.
        stage: what it is for.
        value: the rate, the decay, or the part of the best rate that is tried; else 0.
        seed: of the starting weights and of the order of the samples.
    """

    race: str
    method: str
    stage: Stage
    value: float = 0.0
    seed: int = TUNING_SEED

    @property
    def name(self) -> str:
        """Also that of its file."""
        ending = self.seed if self.stage == "seed" else self.value
        return f"{self.race}.{self.method}.{self.stage}-{ending}"

    @property
    def part(self) -> float:
        """Of the budget that the run takes, at most."""
        return {"rate": MIDDLE, "decay": self.value, "near": MIDDLE, "seed": 1.0}[self.stage]


@lru_cache
def cells_of(device: str) -> dict[str, Cell]:
    """All cells of a device by name, those that the goals are about first."""
    races, methods = RACES[device], methods_of(device)
    first = [race for race in FIRST_RACES if race in races]
    forms = [name for name, method in methods.items() if method.kind is not None]
    pairs = [
        *((race, method) for method in FIRST_METHODS if method in methods for race in first),
        *((race, method) for race in races for method in methods if method not in forms),
        *((race, method) for race in first for method in forms),
    ]
    return {cell.name: cell for race, method in pairs for cell in _runs(race, method)}


def first_tries(race: str, method: str) -> list[Cell]:
    """The runs that try its learning rates."""
    return [
        Cell(race=race, method=method, stage="rate", value=rate) for rate in METHODS[method].rates
    ]


def second_tries(race: str, method: str) -> list[Cell]:
    """The runs that try something else with the best of these rates."""
    stage: Stage = "decay" if METHODS[method].decays else "near"
    values = OTHER_DECAYS if METHODS[method].decays else NEAR
    return [Cell(race=race, method=method, stage=stage, value=value) for value in values]


def _runs(race: str, method: str) -> Iterator[Cell]:
    if METHODS[method].own_rate:
        yield from first_tries(race, method)
        yield from second_tries(race, method)
    for seed in SEEDS:
        yield Cell(race=race, method=method, stage="seed", seed=seed)


def needs_fresh_process(cell: Cell) -> bool:
    """Whether the first steps are timed in a process of their own: once a race and method."""
    return cell.stage == "seed" and cell.seed == SEEDS[0]


def expected_seconds(name: str, device: torch.device) -> float:
    """How long a cell takes at most, about and all told."""
    cell = cells_of(device.type)[name]
    fresh = FRESH_PROCESS_SECONDS if needs_fresh_process(cell) else 0.0
    seconds = cell.part * RACES[device.type][cell.race].seconds
    return OVERHEAD * seconds + OVERHEAD_SECONDS + fresh
