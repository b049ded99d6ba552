"""Learning rates of first-order methods for the problems of the laboratory.

A rate is given a number of epochs and no time limit, so that a busy machine finds the same rate as
an idle one. The rates are powers of 2 apart. Where the best is the smallest or the largest that was
tried, the next one is tried too.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.environment import UnavailableError, sentence
from benchmarks.parts import Part, Section, Sections, Setting, markdown
from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.runs import load, prepare
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.sources import DataError

SEEDS = (0,)
# Where the search begins, and the most rates that are tried.
FIRST_RATES = {"adam": 0.001, "adamw": 0.001, "sgd": 0.001}
RATES_AT_FIRST, MOST_RATES = 4, 10
# Rate to error: infinite for a rate with which nothing is learnt.
Errors = dict[float, float]


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form of a problem.

    Attributes:
        problem: its name.
        epochs: as many as two idle cores make in about 20 s.
        methods: first-order methods that are tuned on it.
        options: of the problem.
    """

    problem: str
    epochs: int
    methods: tuple[str, ...] = ("adam", "adamw", "sgd")
    options: dict[str, Any] = field(default_factory=lambda: {"size": "small"})


# Those on which Adam learns something in so many epochs, which are steps on all points. There is no
# weight decay, so AdamW is Adam.
EQUATIONS = {
    "poisson-2d-small": 1_500,
    "poisson-2d-medium": 400,
    "heat-1d": 700,
    "reaction": 240,
    "wave": 200,
    "burgers": 100,
    "allen-cahn": 100,
}
FORMS = {
    "curves-small": Form(problem="curves", epochs=150),
    "mnist-autoencoder-small": Form(problem="mnist-autoencoder", epochs=110),
    "mnist-classifier-small": Form(problem="mnist-classifier", epochs=250),
    **{
        name: Form(problem=name, epochs=epochs, methods=("adam",), options={})
        for name, epochs in EQUATIONS.items()
    },
}


def sections(device: torch.device) -> list[str]:
    """One for each method on each form; a rate does not depend on the device."""
    del device
    return [f"{form}-{method}" for form in FORMS for method in FORMS[form].methods]


def measure(section: str, setting: Setting) -> Section:
    """The lowest validation error with each rate."""
    name, _, method = section.rpartition("-")
    form = FORMS[name]
    settings = RunSettings(
        problem=form.problem,
        problem_options=form.options,
        optimizer=method,
        device=setting.device.type,
        limits=Limits(iterations=form.epochs, early_stop=None),
    )
    try:
        problem = load(settings)
    except DataError as missing:
        raise UnavailableError(str(missing)) from missing

    def error(rate: float) -> float:
        return fmean(_error(settings, problem, rate, seed) for seed in SEEDS)

    errors = search(FIRST_RATES[method], error)
    return {
        "form": name,
        "method": method,
        "epochs": form.epochs,
        "seeds": list(SEEDS),
        "errors": [
            {"rate": rate, "validation": None if error == float("inf") else error}
            for rate, error in errors.items()
        ],
        "best": best(errors),
    }


def search(first: float, error: Callable[[float], float]) -> Errors:
    """The errors of rates around the best, ascending by rate."""
    errors = {rate: error(rate) for rate in (first * 2.0**n for n in range(RATES_AT_FIRST))}
    while len(errors) < MOST_RATES and best(errors) in (min(errors), max(errors)):
        rate = min(errors) / 2 if best(errors) == min(errors) else 2 * max(errors)
        errors[rate] = error(rate)
    return dict(sorted(errors.items()))


def best(errors: Errors) -> float:
    """The rate of the lowest error."""
    return min(errors, key=lambda rate: errors[rate])


def _error(settings: RunSettings, problem: Problem, rate: float, seed: int) -> float:
    """The lowest validation error of a run with this rate."""
    asked = replace(settings, optimizer_options={"lr": rate}, seed=seed)
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place) / "run")
        prepare(asked, problem, folder, checkpoint_seconds=float("inf")).run()
        outcome = folder.outcome()
    assert outcome is not None
    ended = outcome["last"]["iteration"] == settings.limits.iterations
    error = float(outcome["best"]["validation"]) if ended else float("inf")
    print(f"{settings.optimizer} with {rate:g}, seed {seed}: {error:g}", flush=True)
    return error


def table(sections: Sections, device: torch.device) -> str:
    """One row for each method on each form."""
    del device
    rows = [["form", "method", "epochs", "rate", "validation error with each rate"]]
    for section in sections.values():
        tried = ", ".join(
            f"{row['rate']:g}: "
            + ("diverged" if row["validation"] is None else f"{row['validation']:.3g}")
            for row in section["errors"]
        )
        rate = f"{section['best']:g}"
        rows.append([section["form"], section["method"], str(section["epochs"]), rate, tried])
    caption = (
        "The lowest validation error within the epochs, mean of "
        f"{len(next(iter(sections.values()))['seeds'])} seeds, with a rate that stays. "
        f"{sentence(*(section['environment'] for section in sections.values()))}."
    )
    return f"{markdown(rows)}\n\n{caption}"


PART = Part(sections=sections, measure=measure, tables={"": table}, kept=True)
