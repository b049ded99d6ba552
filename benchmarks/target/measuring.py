"""A cell is run: same start for all methods, seconds of training alone."""

import copy
import math
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from benchmarks.environment import UnavailableError, device_name, physical_cores
from benchmarks.parts import Section, Setting
from benchmarks.records import read
from benchmarks.target.cells import (
    KEYS,
    RACES,
    Cell,
    Race,
    cells_of,
    needs_fresh_process,
)
from benchmarks.target.choices import Choice, choice_of, time_to_beat
from benchmarks.target.disturbance import LEAST, is_disturbed, other_runs, share
from benchmarks.target.methods import METHODS, first_steps, settings_of
from benchmarks.target.mini_batches import MiniBatches
from benchmarks.target.updates import make_update
from krylov_descent.laboratory.contenders import contender
from krylov_descent.laboratory.limits import Ending, Limits
from krylov_descent.laboratory.problems import load_problem
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.sources import DataError
from krylov_descent.laboratory.training import Training

CURVE_POINTS = 100
# Steps of mini-batches in a warm-up; each is a 2000th of the budget.
WARM_UP_STEPS = 10
ATTEMPTS = 2


class DisturbedError(RuntimeError):
    """A run had far fewer passes than the others of its method, again and again."""


def measure(section: str, setting: Setting) -> Section:
    """Run a cell.

    Raises:
        DisturbedError: with one of the seeds that count the machine was busy with something else,
            twice. A try that is slow twice is kept.
        UnavailableError: the data, the library or the learning rate is missing.
    """
    device = setting.device
    cell = cells_of(device.type)[section]
    race, method = RACES[device.type][cell.race], METHODS[cell.method]
    method.require()
    choice = choice_of(cell, setting.folder)
    problem = _problem(cell.race, device)
    first = _in_a_fresh_process(cell, device) if needs_fresh_process(cell) else None
    to_beat = math.inf if cell.stage == "seed" else time_to_beat(cell, setting.folder)
    others = other_runs(cell, device_name(device), setting.folder)
    for _ in range(ATTEMPTS):
        with _even_terms():
            _warm_up(cell.method, cell.race, device)
            found = run(cell, race, problem, choice, to_beat=to_beat)
        if not is_disturbed(found, others):
            return {**found, "first_steps_seconds": first}
        print(f"refused: {share(found, others):.0%} of the passes of other runs in the same time")
    if cell.stage != "seed":  # it is the setting that is slow, as where units are dead
        return {**found, "first_steps_seconds": first, "slow": True}
    raise DisturbedError(
        f"{section} made less than {LEAST:.0%} of the passes that other runs of the method made in "
        f"the same time, {ATTEMPTS} times; is something else running?"
    )


@contextmanager
def _even_terms() -> Iterator[None]:
    """One thread for each core, which stays so for the record, and no denormal numbers.

    Networks whose units are dead have gradients of denormal numbers. Processors take many times
    as long for them, so a rate that is too high would look like a run that was disturbed.
    """
    torch.set_num_threads(physical_cores())
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def is_stale(section: str, setting: Setting) -> bool:
    """Whether a cell that is there was disturbed, or made with what is not the best any more."""
    found = read(setting.folder / f"{section}.json")
    cell = cells_of(setting.device.type)[section]
    others = other_runs(cell, found["environment"]["device"], setting.folder)
    if is_disturbed(found, others):
        return True
    if METHODS[cell.method].rates and "decay" not in found:  # made before decays were tried
        return True
    try:
        choice = choice_of(cell, setting.folder)
    except UnavailableError:  # nothing is known that speaks against it
        return False
    return choice is not None and choice != Choice(found["rate"], found["decay"])


def run(
    cell: Cell, race: Race, problem: Problem, choice: Choice | None, *, to_beat: float = math.inf
) -> Section:
    """Train, and keep the curve and when the errors were reached.

    A rate that is 0 ends the run, since nothing changes any more. A try of a setting also ends when
    the training error is reached, or when another one has been faster.
    """
    device = problem.train[0].device
    part = cell.part if choice is None or choice.decay is None else choice.decay
    seconds = part * race.seconds
    model = problem.make_model(cell.seed, None, device)
    optimizer = make_optimizer(cell.method, race, problem, model, choice, seconds, cell.seed)
    limits = Limits(seconds=min(seconds, to_beat), early_stop=None)

    def end_a_try(row: Row, _: Any) -> None:
        if cell.stage != "seed" and row["train"] <= race.train:
            training.interrupted = True

    with TemporaryDirectory() as path:
        folder = RunFolder(Path(path))
        folder.begin({})
        training = Training(
            problem,
            model,
            optimizer,
            folder,
            limits,
            on_row=end_a_try,
            checkpoint_seconds=math.inf,
        )
        ending = training.run()
        rows = folder.rows()
    if ending is Ending.INTERRUPTED:
        ending = Ending.SOLVED
    last = _finite(rows[-1])
    print(f"{ending.name}: train {last['train']}, test {last['test']} at {last['seconds']:.2f} s")
    return {
        "cell": {"race": cell.race, "method": cell.method, "stage": cell.stage, "seed": cell.seed},
        "rate": choice.rate if choice else None,
        "decay": choice.decay if choice else None,
        "options": settings_of(cell.method),
        "seconds": seconds,
        "batch_size": race.batch_size if METHODS[cell.method].rates else None,
        "targets": {"train": race.train, "test": race.test},
        "reached": {
            "train": reached(rows, "train", race.train),
            "test": reached(rows, "test", race.test),
        },
        "ending": ending.name.lower(),
        "last": last,
        "lowest_test": min(row["test"] for row in rows if math.isfinite(row["test"])),
        "steps": rows[-1]["iteration"],
        "passes_per_second": rows[-1]["passes"] / rows[-1]["seconds"],
        # Of all threads: far below their number where the machine was busy.
        "cpu_seconds_per_second": rows[-1]["cpu_seconds"] / rows[-1]["seconds"],
        "curve": [list(_finite(row).values()) for row in thinned(rows)],
    }


def make_optimizer(
    method: str,
    race: Race,
    problem: Problem,
    model: nn.Module,
    choice: Choice | None,
    seconds: float,
    seed: int,
) -> Any:
    """The method in its fastest form."""
    kind = METHODS[method].kind or method
    if choice is None:
        return contender(kind).make(problem, model, seed, settings_of(method))
    recorded = problem.train[0].device.type == "cuda"
    update = make_update(kind, model, problem.weight_decay, recorded=recorded)
    return MiniBatches(
        model,
        problem.loss,
        update,
        batch_size=race.batch_size,
        rate=choice.rate,
        seconds=seconds,
        decay=None if choice.decay is None else choice.decay * race.seconds,
        seed=seed,
        recorded=recorded,
        precision="tf32" if METHODS[method].tf32 else "float32",
    )


def reached(rows: list[Row], error: str, level: float) -> float | None:
    """Seconds until an error was at most the level; None if it never was."""
    return next((row["seconds"] for row in rows if row[error] <= level), None)


def thinned(rows: list[Row], points: int = CURVE_POINTS) -> list[Row]:
    """At most about so many rows, first and last among them.

    At equal distances in the logarithm of seconds, as figures have them: most happens early.
    """
    later = [row["seconds"] for row in rows if row["seconds"] > 0]
    if len(later) < 2:
        return rows
    growth = (later[-1] / later[0]) ** (1 / points)
    kept, following = [], 0.0
    for row in rows:
        if row["seconds"] >= following or row is rows[-1]:
            kept.append(row)
            following = growth * row["seconds"]
    return kept


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


def _in_a_fresh_process(cell: Cell, device: torch.device) -> float:
    """Seconds of the first steps where nothing has run before."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_first_steps, cell.method, cell.race, device).result()


def _first_steps(method: str, race: str, device: torch.device) -> float:
    with _even_terms():
        return _warm_up(method, race, device)


@cache
def _warm_up(method: str, race: str, device: torch.device) -> float:
    """A few steps of a copy, once: what libraries do at their first call is nobody's time.

    Returns:
        The seconds that it took.
    """
    chosen, problem = RACES[device.type][race], _problem(race, device)
    model = copy.deepcopy(problem.make_model(0, None, device))
    rates = METHODS[method].rates
    choice = Choice(rates[0], 1.0) if rates else None
    optimizer = make_optimizer(method, chosen, problem, model, choice, chosen.seconds, 0)
    started = time.perf_counter()
    for _ in range(WARM_UP_STEPS if rates else first_steps(METHODS[method].kind or method)):
        optimizer.step(problem.train)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
