"""A section of the road test: all runs of a method on a problem."""

import gc
import math
import time
from functools import cache

import torch

from benchmarks.parts import Section, Setting
from benchmarks.road import methods
from benchmarks.road.methods import METHODS
from benchmarks.road.problem import Course, RoadProblem
from benchmarks.road.problems import COURSES, PROBLEMS

SEEDS = (0, 1, 2)
# The loss is measured, outside of the clock, when the clock has gone on by this part of itself.
RESOLUTION = 0.03
LEVELS = ("modest", "demanding")
# Beyond the seconds of training: losses are measured, models are made.
OVERHEAD = 1.3


def names(device: torch.device) -> list[str]:
    """All sections of a device: the defaults first, then the others problem by problem."""
    here = COURSES[device.type]
    first = [f"{name}.{methods.DEFAULT}" for name in here]
    others = [m for m in methods.methods_of(device.type) if m != methods.DEFAULT]
    return first + [f"{name}.{method}" for name in here for method in others]


def expected_seconds(section: str, device: torch.device) -> float:
    """The most that a section should take."""
    problem, method = section.split(".")
    runs = len(METHODS[method].settings) + len(SEEDS) - 1
    return OVERHEAD * runs * COURSES[device.type][problem].seconds


def measure(section: str, setting: Setting) -> Section:
    """All settings with the first seed, then the best of them with the other seeds.

    Where no setting reaches the demanding loss, the other seeds are left out.
    """
    name, method = section.split(".")
    METHODS[method].require()
    problem, device = PROBLEMS[name], setting.device
    course = COURSES[device.type][name]
    _warm_up(method, name, device)
    runs: list[Section] = []
    for choice in METHODS[method].settings:
        # A setting that takes longer than another one to the demanding loss is not chosen.
        limit = min((order(found)[0] for found in runs), default=math.inf)
        runs.append(run(problem, method, choice, course, SEEDS[0], device, limit=limit))
    best = min(runs, key=order)
    others = SEEDS[1:] if best["reached"]["demanding"] is not None else ()
    runs += [run(problem, method, best["setting"], course, seed, device) for seed in others]
    chosen = [found for found in runs if found["setting"] == best["setting"]]
    for found in runs:
        print(f"  {found['setting']} seed {found['seed']}: {found['reached']}, {found['loss']}")
    return {
        "seconds": course.seconds,
        "targets": {level: getattr(course, level) for level in LEVELS},
        "chosen": best["setting"],
        "runs": chosen,
        "others": [
            {key: found[key] for key in ("setting", "reached", "loss")}
            for found in runs
            if found not in chosen
        ],
    }


def order(found: Section) -> tuple[float, ...]:
    """Runs are ordered by the time to the demanding loss, that to the modest one, and the loss."""
    reached = [found["reached"][level] for level in reversed(LEVELS)]
    last = found["loss"]
    return (
        *(math.inf if seconds is None else seconds for seconds in reached),
        math.inf if last is None else last,
    )


def run(
    problem: RoadProblem,
    method: str,
    choice: methods.Setting,
    course: Course,
    seed: int,
    device: torch.device,
    *,
    limit: float = math.inf,
) -> Section:
    """Train until the demanding loss is reached, nothing is left to gain, or the time is over.

    Args:
        problem: what is trained.
        method: by which name.
        choice: its setting.
        course: the time, over which learning rates fall to 0, and the losses to reach.
        seed: of the start.
        device: where.
        limit: seconds after which the run is given up.
    """
    if device.type == "cuda":  # what earlier runs left
        gc.collect()
        torch.cuda.empty_cache()
    task = problem.make(device.type, seed).to(device)
    passed, measured, steps, refused, most, ended = 0.0, 0.0, 0, 0, 0, False
    loss = task.value()
    curve = [(0.0, loss)]
    reached: dict[str, float | None] = dict.fromkeys(LEVELS)
    try:
        step = methods.stepper(method, problem, task, choice, course.seconds, seed)
        end = min(course.seconds, limit)
        while passed < end and not ended and reached["demanding"] is None:
            started = time.perf_counter()
            was_refused, ended = step(max(0.0, 1 - passed / course.seconds))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            passed += time.perf_counter() - started
            steps, refused = steps + 1, refused + 1 if was_refused else 0
            most = most if ended else max(most, refused)
            ended = ended and was_refused
            if passed < measured * (1 + RESOLUTION) and passed < end and not ended:
                continue
            measured, loss = passed, task.value()
            curve.append((round(passed, 4), loss))
            for level in LEVELS:
                if reached[level] is None and loss <= getattr(course, level):
                    reached[level] = passed
            if not math.isfinite(loss):
                break
    except (RuntimeError, ValueError, FloatingPointError) as problem_found:
        return {
            "setting": choice,
            "seed": seed,
            "reached": reached,
            "loss": None,
            "error": str(problem_found).splitlines()[0],
        }
    return {
        "setting": choice,
        "seed": seed,
        "reached": reached,
        "loss": loss if math.isfinite(loss) else None,
        "steps": steps,
        "refused": most,
        "ended": ended,
        "curve": [[s, _rounded(value)] for s, value in curve],
    }


def _rounded(value: float) -> float | None:
    """Four digits of a loss; JSON has no NaN."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


@cache
def _warm_up(method: str, name: str, device: torch.device) -> None:
    """Two steps, once: what libraries do at their first call is nobody's time."""
    problem = PROBLEMS[name]
    if device.type == "cuda":
        from krylov_descent.cuda.triton.availability import availability

        availability(torch.device("cuda", torch.cuda.current_device())).wait()
    task = problem.make(device.type, 0).to(device)
    course = COURSES[device.type][name]
    step = methods.stepper(method, problem, task, METHODS[method].settings[0], course.seconds, 0)
    for _ in range(2):
        step(1.0)
