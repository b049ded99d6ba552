"""Times to the targets as tables; cells that are not there are shown as missing."""

import math
import statistics

import torch

from benchmarks.environment import sentence
from benchmarks.parts import NOT_MEASURED, Section, Sections, markdown
from benchmarks.target.cells import FIRST_RACES, KEYS, RACES, SEEDS, Cell, Race
from benchmarks.target.methods import Method, methods_of

MISSING, NEVER = "missing", "not reached"


def seeds_of(sections: Sections, race: str, method: str) -> list[Section]:
    """The full runs of a method that are there."""
    names = [Cell(race=race, method=method, stage="seed", seed=seed).name for seed in SEEDS]
    return [sections[name] for name in names if name in sections]


def times(runs: list[Section], error: str) -> list[float]:
    """Seconds to the target of each run; infinity where it was not reached."""
    found = (run["reached"][error] for run in runs)
    return [math.inf if seconds is None else seconds for seconds in found]


def median_time(
    sections: Sections, race: str, method: str, error: str, seeds: int = len(SEEDS)
) -> float | None:
    """Over the seeds that are there; None while there are fewer than so many."""
    runs = seeds_of(sections, race, method)
    return statistics.median(times(runs, error)) if len(runs) >= seeds else None


def target_table(sections: Sections, device: torch.device) -> str:
    """One table a problem, one row a method that was run; the others are named."""
    races = RACES[device.type]
    methods = methods_of(device.type)
    tables = [_race_table(sections, name, race, methods) for name, race in races.items()]
    if not sections:
        return NOT_MEASURED
    environments = [section["environment"] for section in sections.values()]
    caption = (
        "Seconds of training until the error is reached: median of three seeds (lowest to "
        "highest), and in times of KSD's. The learning rate is the best of four by the training "
        "error at the end of a quarter of the time, with one seed, and falls linearly to 0 over "
        "the time. Tried were "
        f"{_grids(methods)}. {sentence(*environments)}."
    )
    return "\n\n".join([*tables, caption])


def _grids(methods: dict[str, Method]) -> str:
    """The learning rates of each method that has one."""
    return "; ".join(
        f"{method.title}: {', '.join(f'{rate:g}' for rate in method.rates)}"
        for method in methods.values()
        if method.own_rate
    )


def _race_table(sections: Sections, name: str, race: Race, methods: dict[str, Method]) -> str:
    rows = [
        [
            "method",
            "rate",
            f"training error {race.train:g}",
            "of KSD",
            f"test error {race.test:g}",
            "of KSD",
            "errors at the end (training / test)",
            "lowest test error",
        ]
    ]
    missing = []
    for method, described in methods.items():
        if described.kind is not None and name not in FIRST_RACES:
            continue
        runs = seeds_of(sections, name, method)
        if not runs:
            missing.append(described.title)
            continue
        cells = [described.title, f"{runs[0]['rate']:g}" if described.rates else "–"]
        for error in ("train", "test"):
            cells += [_time(runs, error), _relative(sections, name, method, error)]
        rows.append([*cells, _errors(runs), _lowest(runs)])
    batch = f"mini-batches of {race.batch_size:,}"
    parts = [f"**{race.title}**, {race.seconds:g} s, {batch}"]
    if len(rows) > 1:
        parts.append(markdown(rows))
    if missing:
        parts.append(f"Missing: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _time(runs: list[Section], error: str) -> str:
    found = times(runs, error)
    text = _seconds(statistics.median(found))
    if len(found) > 1 and min(found) < math.inf:
        text += f" ({_seconds(min(found))} to {_seconds(max(found))})"
    return text if len(runs) == len(SEEDS) else f"{text}, {len(runs)} of {len(SEEDS)} seeds"


def _seconds(value: float) -> str:
    return NEVER if value == math.inf else f"{value:.2f} s"


def _relative(sections: Sections, race: str, method: str, error: str) -> str:
    own = median_time(sections, race, "ksd", error)
    other = median_time(sections, race, method, error)
    if not own or other is None or math.inf in (own, other):
        return "–"
    return f"{other / own:.2f}"


def _lowest(runs: list[Section]) -> str:
    """The lowest test error on the way, median of the seeds."""
    column = KEYS.index("test")
    found = [min(row[column] for row in run["curve"] if row[column] is not None) for run in runs]
    return f"{statistics.median(found):.3g}"


def _errors(runs: list[Section]) -> str:
    shown = []
    for error in ("train", "test"):
        found = [run["last"][error] for run in runs]
        finite = [value for value in found if value is not None]
        shown.append(f"{statistics.median(finite):.3g}" if finite else "NaN")
    return " / ".join(shown)
