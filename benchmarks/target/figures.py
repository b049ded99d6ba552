"""Learning curves and the performance profile."""

import math
from functools import partial
from pathlib import Path

import torch

from benchmarks.figures import Line, draw
from benchmarks.parts import Figure, Sections
from benchmarks.target.cells import RACES
from benchmarks.target.measuring import KEYS
from benchmarks.target.methods import METHODS
from benchmarks.target.tables import median_time, seeds_of

Profile = dict[str, list[float]]


def ratios(sections: Sections, device: str) -> Profile:
    """Of each method, on every target that some method reached: its time over the best one's.

    Infinity where it did not reach the target, or its runs are missing.
    """
    found: Profile = {}
    for race in RACES[device]:
        for error in ("train", "test"):
            times = {method: median_time(sections, race, method, error) for method in METHODS}
            known = [time for time in times.values() if time is not None and time < math.inf]
            if not known:
                continue
            for method, time in times.items():
                ratio = math.inf if time is None else time / min(known)
                found.setdefault(method, []).append(ratio)
    return found


def profile(sections: Sections, device: torch.device, path: Path) -> None:
    """Dolan and Moré's: the part of the targets that a method reaches within τ times the best."""
    lines = []
    for method, values in ratios(sections, device.type).items():
        reached = sorted(value for value in values if value < math.inf)
        x = [1.0, *reached, max([10.0, *reached]) * 1.2]
        counts = [sum(value <= at for value in values) / len(values) for at in x]
        lines.append(Line(METHODS[method].title, x, counts))
    draw(
        path,
        {"part of the targets reached": lines},
        x_label="times the fastest method's time",
        y_scale="linear",
        steps=True,
    )


def curves(race: str, sections: Sections, device: torch.device, path: Path) -> None:
    """Training and test error over seconds, the first seed of each method that was run."""
    chosen = RACES[device.type][race]
    panels: dict[str, list[Line]] = {"training error": [], "test error": []}
    for method, described in METHODS.items():
        runs = seeds_of(sections, race, method)
        if not runs:
            continue
        for label, key in (("training error", "train"), ("test error", "test")):
            column = KEYS.index(key)
            # A logarithm has no place for the start or an error of zero.
            points = [(row[0], row[column]) for row in runs[0]["curve"] if row[0] and row[column]]
            x, y = [point[0] for point in points], [point[1] for point in points]
            panels[label].append(Line(described.title, x, y))
    levels = {"training error": chosen.train, "test error": chosen.test}
    draw(path, panels, x_label=f"seconds of training, {chosen.title}", levels=levels)


def _has_runs(race: str, sections: Sections) -> bool:
    return any(seeds_of(sections, race, method) for method in METHODS)


FIGURES = {
    f"target-{name}": Figure(
        f"Learning curves: {name}", partial(curves, name), partial(_has_runs, name)
    )
    for name in RACES["cuda"]
} | {
    "target-profile": Figure(
        "Performance profile", profile, lambda sections: bool(ratios(sections, "cuda"))
    )
}
