"""A cell is run: same start for all methods, seconds of training alone."""

import copy
import math
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.environment import UnavailableError
from benchmarks.parts import Section, Setting
from benchmarks.target.cells import KEYS, RACES, Cell, Race, cells_of, rate_of
from benchmarks.target.methods import METHODS, first_steps, settings_of
from benchmarks.target.mini_batches import MiniBatches
from benchmarks.target.updates import make_update
from krylov_descent.laboratory.contenders import contender
from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems import load_problem
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.sources import DataError
from krylov_descent.laboratory.training import Training

CURVE_POINTS = 100


def measure(section: str, setting: Setting) -> Section:
    """Run a cell."""
    device = setting.device
    cell = cells_of(device.type)[section]
    race, method = RACES[device.type][cell.race], METHODS[cell.method]
    method.require()
    rate = rate_of(cell, method, setting.folder)
    problem = _problem(cell.race, device)
    _warm_up(cell.method, cell.race, device)
    return run(cell, race, problem, rate)


def run(cell: Cell, race: Race, problem: Problem, rate: float | None) -> Section:
    """Train, and keep the curve and when the errors were reached."""
    device = problem.train[0].device
    seconds = cell.seconds(race)
    model = problem.make_model(cell.seed, None, device)
    optimizer = make_optimizer(cell.method, race, problem, model, rate, seconds, cell.seed)
    limits = Limits(seconds=seconds, early_stop=None)
    with TemporaryDirectory() as path:
        folder = RunFolder(Path(path))
        folder.begin({})
        training = Training(problem, model, optimizer, folder, limits, checkpoint_seconds=math.inf)
        ending = training.run()
        rows = folder.rows()
    last = _finite(rows[-1])
    print(f"{ending.value}: train {last['train']}, test {last['test']} at {last['seconds']:.1f} s")
    return {
        "cell": {"race": cell.race, "method": cell.method, "stage": cell.stage, "seed": cell.seed},
        "rate": rate,
        "options": settings_of(cell.method, race.row),
        "seconds": seconds,
        "batch_size": race.batch_size if METHODS[cell.method].rates else None,
        "targets": {"train": race.train, "test": race.test},
        "reached": {
            "train": reached(rows, "train", race.train),
            "test": reached(rows, "test", race.test),
        },
        "ending": ending.name.lower(),
        "last": last,
        "steps": rows[-1]["iteration"],
        "curve": [list(_finite(row).values()) for row in thinned(rows)],
    }


def make_optimizer(
    method: str,
    race: Race,
    problem: Problem,
    model: nn.Module,
    rate: float | None,
    seconds: float,
    seed: int,
) -> Any:
    """The method in its fastest form."""
    kind = METHODS[method].kind or method
    if rate is None:
        options = settings_of(method, race.row)
        return contender(kind).make(problem, model, seed, options)
    recorded = problem.train[0].device.type == "cuda"
    update = make_update(kind, model, problem.weight_decay, recorded=recorded)
    return MiniBatches(
        model,
        problem.loss,
        update,
        batch_size=race.batch_size,
        rate=rate,
        seconds=seconds,
        seed=seed,
        recorded=recorded,
        precision="tf32" if METHODS[method].tf32 else "float32",
    )


def reached(rows: list[Row], error: str, level: float) -> float | None:
    """Seconds until an error was at most the level; None if it never was."""
    return next((row["seconds"] for row in rows if row[error] <= level), None)


def thinned(rows: list[Row], points: int = CURVE_POINTS) -> list[Row]:
    """At most about so many rows, first and last among them.

    At equal distances in the logarithm of steps, as figures have them: most happens early.
    """
    places = {0} | {round((len(rows) - 1) ** (i / points)) for i in range(points + 1)}
    return [row for i, row in enumerate(rows) if i in places]


def _finite(row: Row) -> dict[str, float | None]:
    """What is kept of a row; JSON has no NaN."""
    return {key: row[key] if math.isfinite(row[key]) else None for key in KEYS}


@lru_cache(maxsize=1)
def _problem(race: str, device: torch.device) -> Problem:
    chosen = RACES[device.type][race]
    try:
        return load_problem(chosen.problem, **chosen.options).to(device)
    except DataError as reason:
        raise UnavailableError(f"{chosen.title}: {reason}") from reason


@cache
def _warm_up(method: str, race: str, device: torch.device) -> None:
    """A few steps of a copy, once: what libraries do at their first call is nobody's time."""
    chosen, problem = RACES[device.type][race], _problem(race, device)
    model = copy.deepcopy(problem.make_model(0, None, device))
    rates = METHODS[method].rates
    optimizer = make_optimizer(
        method, chosen, problem, model, rates[0] if rates else None, chosen.seconds, 0
    )
    for _ in range(1 if rates else first_steps(settings_of(method, chosen.row))):
        optimizer.step(problem.train)
