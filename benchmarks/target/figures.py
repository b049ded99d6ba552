"""Learning curves and the performance profile."""

import math
from functools import partial
from pathlib import Path

import torch

from benchmarks.figures import Line, draw, draw_profile
from benchmarks.parts import Figure, Section, Sections
from benchmarks.target.cells import KEYS, RACES, SEEDS
from benchmarks.target.methods import METHODS
from benchmarks.target.tables import median_time, seeds_of

Profile = dict[str, list[float]]


def ratios(sections: Sections, device: str) -> Profile:
    """Of each method, on every target that some method reached: its time over the best one's.

    Infinity where it did not reach the target. The targets are those of the races that KSD has
    run, the methods those that have run all of these, if with one seed.
    """
    targets = {
        (race, error): {
            method: time
            for method in METHODS
            if (time := median_time(sections, race, method, error, seeds=1)) is not None
        }
        for race in RACES[device]
        for error in ("train", "test")
    }
    compared = [times for times in targets.values() if "ksd" in times]
    complete = [method for method in METHODS if all(method in times for times in compared)]
    found: Profile = {}
    for times in compared:
        best = min(times[method] for method in complete)
        for method in complete if best < math.inf else []:
            found.setdefault(method, []).append(times[method] / best)
    return found


def profile(sections: Sections, device: torch.device, path: Path) -> None:
    """The performance profile of the methods."""
    found = ratios(sections, device.type)
    titles = {m: f"{METHODS[m].title}{_seeds(sections, device, m)}" for m in found}
    draw_profile(path, {titles[method]: values for method, values in found.items()})


def _seeds(sections: Sections, device: torch.device, method: str) -> str:
    """What to say of a method with fewer seeds than three on some problem: the fewest."""
    counts = [len(seeds_of(sections, race, method)) for race in RACES[device.type]]
    fewest = min(count for count in counts if count)
    return "" if fewest == len(SEEDS) else f" ({fewest} of {len(SEEDS)} seeds)"


def curves(race: str, sections: Sections, device: torch.device, path: Path) -> None:
    """Training and test error over seconds, the first seed of each method that was run."""
    chosen = RACES[device.type][race]
    panels: dict[str, list[Line]] = {"training error": [], "test error": []}
    for method, described in METHODS.items():
        runs = seeds_of(sections, race, method)
        if not runs:
            continue
        for label, key in (("training error", "train"), ("test error", "test")):
            panels[label].append(_line(described.title, runs[0], "seconds", key))
    levels = {"training error": chosen.train, "test error": chosen.test}
    draw(path, panels, x_label=f"seconds of training, {chosen.title}", levels=levels)


def _line(title: str, run: Section, x: str, y: str) -> Line:
    """A learning curve; a logarithm has no place for the start or an error of zero."""
    columns = KEYS.index(x), KEYS.index(y)
    points = [tuple(row[i] for i in columns) for row in run["curve"]]
    shown = [point for point in points if all(point)]
    return Line(title, [point[0] for point in shown], [point[1] for point in shown])


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
    ),
}
