"""A section: the runs of a method on an equation with a seed."""

import copy
import math
import time

import torch

from benchmarks.environment import UnavailableError
from benchmarks.parts import Section, Setting
from benchmarks.physics.methods import METHODS
from benchmarks.records import read
from benchmarks.road.methods import Setting as Choice
from krylov_descent.laboratory.physics.equation import Equation, on_device
from krylov_descent.laboratory.physics.equations import EQUATIONS

SEEDS = (0, 1, 2)
# The error is noted after so many seconds of training; the last of them ends a run.
MARKS = {"cpu": (10.0, 30.0), "cuda": (10.0, 30.0)}
# On a CPU, those that are small enough.
SMALL = (
    "poisson-2d-small",
    "poisson-2d-medium",
    "heat-1d",
    "poisson-5d",
    "wave",
    "helmholtz",
    "reaction",
    "convection-30",
)
# The error is measured, outside of the clock, when the clock has gone on by this part of itself.
RESOLUTION = 0.02
# Beyond the seconds of training: errors are measured, nets are made.
OVERHEAD = 1.1


def names(device: torch.device) -> list[str]:
    """All sections of a device: the first seed of everything, then the others."""
    here = SMALL if device.type == "cpu" else tuple(EQUATIONS)
    return [f"{name}.{method}.seed-{seed}" for seed in SEEDS for name in here for method in METHODS]


def expected_seconds(section: str, device: torch.device) -> float:
    """The most that a section should take."""
    _, method, seed = parsed(section)
    runs = len(METHODS[method].settings) if seed == SEEDS[0] else 1
    return OVERHEAD * runs * MARKS[device.type][-1]


def parsed(section: str) -> tuple[str, str, int]:
    """The equation, the method and the seed of a section."""
    name, method, seed = section.split(".")
    return name, method, int(seed.removeprefix("seed-"))


def measure(section: str, setting: Setting) -> Section:
    """All settings with the first seed; with another seed the one that was best with the first."""
    name, method, seed = parsed(section)
    problem, device = EQUATIONS[name], setting.device
    METHODS[method].require(sum(p.numel() for p in problem.make_net(0).parameters()))
    choices = METHODS[method].settings
    if len(choices) > 1 and seed != SEEDS[0]:
        first = setting.folder / f"{name}.{method}.seed-{SEEDS[0]}.json"
        if not first.exists():
            raise UnavailableError(f"{first.stem} chooses the setting, and was not measured")
        choices = (read(first)["setting"],)
    runs = [run(problem, method, choice, seed, device) for choice in choices]
    for found in runs:
        print(f"  {found['setting']}: {found['errors']}")
    best = min(runs, key=lambda found: found["errors"][-1] or math.inf)
    others = [found for found in runs if found is not best]
    return {"marks": MARKS[device.type], **best, "others": others}


def run(problem: Equation, method: str, choice: Choice, seed: int, device: torch.device) -> Section:
    """Train for the time; the errors [marks] are those of the last step before each mark."""
    marks = MARKS[device.type]
    net = problem.make_net(seed).to(device)
    terms = on_device(problem.make_terms(), device)
    passed, measured, steps, errors = 0.0, 0.0, 0, list[float | None]()
    step = METHODS[method].make(net, terms, choice)
    known, failure = _error(problem, net), None
    while len(errors) < len(marks):
        started = time.perf_counter()
        try:
            step(max(0.0, 1 - passed / marks[-1]))
        except RuntimeError as problem_found:  # a factorisation failed: what was reached stays
            failure = str(problem_found).splitlines()[0]
            errors += [known] * (len(marks) - len(errors))
            break
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        passed, steps = passed + time.perf_counter() - started, steps + 1
        # A step that ends after a mark does not count for it.
        while len(errors) < len(marks) and passed > marks[len(errors)]:
            errors.append(known)
        if passed > (1 + RESOLUTION) * measured:
            measured, known = passed, _error(problem, net)
    found = {"setting": choice, "seed": seed, "steps": steps, "errors": errors}
    return found if failure is None else found | {"failure": failure}


def _error(problem: Equation, net: torch.nn.Module) -> float | None:
    """The relative error with three digits, by a copy on the CPU; None if it is not finite."""
    found = problem.error(copy.deepcopy(net).cpu())
    return float(f"{found:.3g}") if math.isfinite(found) else None
