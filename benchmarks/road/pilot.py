"""Finds what a problem can be asked to reach: `python -m benchmarks.road.pilot cpu [PROBLEM ...]`.

Every method runs for the whole time with a seed that takes no part in the road test. Printed are,
for each problem, the modest and the demanding loss, and what each method had after 60% of the time.
"""

import math
import sys

import torch

from benchmarks.road.methods import BEST, METHODS, methods_of
from benchmarks.road.problem import Course
from benchmarks.road.problems import COURSES, PROBLEMS
from benchmarks.road.running import run

SEED, PART = 7, 0.6
# Differences of this part of the loss at the start are left to chance.
LEAST = {torch.float32: 1e-6, torch.float64: 1e-12}


def losses(name: str, kind: str) -> dict[str, float]:
    """By method, after a part of the time; of first-order methods with two learning rates."""
    seconds, found = COURSES[kind][name].seconds, dict[str, float]()
    course = Course(seconds, -math.inf, -math.inf)
    for method in methods_of(kind):
        settings = METHODS[method].settings
        for setting in settings if len(settings) == 1 else settings[1:3]:
            if method != BEST:
                ran = run(PROBLEMS[name], method, setting, course, SEED, torch.device(kind))
                early = [y for x, y in ran.get("curve", ()) if 0 < x <= PART * seconds]
                if early and early[-1] is not None:
                    found[f"{method} {setting.get('rate', '')}".strip()] = early[-1]
    return found


def main(kind: str, only: list[str]) -> None:
    """Problem by problem."""
    for name in only or COURSES[kind]:
        found, task = losses(name, kind), PROBLEMS[name].make(kind, SEED)
        start, dtype = task.value(), next(task.model.parameters()).dtype
        demanding = min(found.values()) + LEAST[dtype] * start
        ordered = sorted(found.items(), key=lambda pair: pair[1])
        shown = ", ".join(f"{method} {value:.2e}" for method, value in ordered)
        modest = math.sqrt(start * demanding)
        print(f"{name}: ({modest:.3g}, {demanding:.6g}) | {shown}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
