"""A section: all runs of a method on an equation."""

import copy
import math
import time

import torch

from benchmarks.parts import Section, Setting
from benchmarks.physics.methods import METHODS
from benchmarks.road.methods import Setting as Choice
from krylov_descent.laboratory.physics.equation import Equation
from krylov_descent.laboratory.physics.equations import EQUATIONS

SEEDS = (0, 1, 2)
# The error is noted after so many seconds of training; the last of them ends a run.
MARKS = {"cpu": (10.0, 30.0), "cuda": (10.0, 30.0, 100.0)}
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
    """All sections of a device, equation by equation."""
    here = SMALL if device.type == "cpu" else tuple(EQUATIONS)
    return [f"{name}.{method}" for name in here for method in METHODS]


def expected_seconds(section: str, device: torch.device) -> float:
    """The most that a section should take."""
    method = METHODS[section.split(".")[1]]
    return OVERHEAD * (len(method.settings) + len(SEEDS) - 1) * MARKS[device.type][-1]


def measure(section: str, setting: Setting) -> Section:
    """All settings with the first seed, then the best of them with the other seeds."""
    name, method = section.split(".")
    problem, device = EQUATIONS[name], setting.device
    METHODS[method].require(sum(p.numel() for p in problem.make_net(0).parameters()))
    runs = [run(problem, method, choice, SEEDS[0], device) for choice in METHODS[method].settings]
    best = min(runs, key=lambda found: found["errors"][-1] or math.inf)
    runs += [run(problem, method, best["setting"], seed, device) for seed in SEEDS[1:]]
    for found in runs:
        print(f"  {found['setting']} seed {found['seed']}: {found['errors']}")
    return {"marks": MARKS[device.type], "chosen": best["setting"], "runs": runs}


def run(problem: Equation, method: str, choice: Choice, seed: int, device: torch.device) -> Section:
    """Train for the time; the errors [marks] are those of the last step before each mark."""
    marks = MARKS[device.type]
    net = problem.make_net(seed).to(device)
    terms = problem.make_terms()
    for term in terms.values():
        points = term.points
        on_device = (points,) if isinstance(points, torch.Tensor) else points
        moved = tuple(tensor.to(device) for tensor in on_device)
        term.points = moved[0] if isinstance(points, torch.Tensor) else moved
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
