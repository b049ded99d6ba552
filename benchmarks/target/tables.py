"""Times to the targets as tables; cells that are not there are shown as missing."""

import math
import statistics
from collections.abc import Callable

import torch

from benchmarks.environment import sentence
from benchmarks.parts import NOT_MEASURED, Section, Sections, markdown
from benchmarks.target.cells import FIRST_RACES, KEYS, RACES, SEEDS, Cell, Race
from benchmarks.target.disturbance import refused
from benchmarks.target.methods import Method, methods_of

NEVER = "not reached"
DECAYS = {1.0: "all", 0.5: "half", 0.25: "quarter"}
FIRST_STEPS = "first steps in a fresh process, s"


def seeds_of(sections: Sections, race: str, method: str) -> list[Section]:
    """The full runs of a method that are there and were not disturbed."""
    start = f"{race}.{method}."
    mine = {name: run for name, run in sections.items() if name.startswith(start)}
    disturbed = refused(mine)
    names = [Cell(race=race, method=method, stage="seed", seed=seed).name for seed in SEEDS]
    return [mine[name] for name in names if name in mine and name not in disturbed]


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
    if not sections:
        return NOT_MEASURED
    races = RACES[device.type]
    methods = methods_of(device.type)
    environments = [section["environment"] for section in sections.values()]
    tables = [_race_table(sections, name, race, methods) for name, race in races.items()]
    caption = (
        "Seconds of training until the error is reached: median of three seeds (lowest to "
        f"highest), and in times of KSD's. {_rules(sections)} Rates: {_grids(sections, methods)}. "
        f"{sentence(*environments)}."
    )
    if disturbed := refused(sections):
        caption += f" Disturbed, and left out: {', '.join(disturbed)}."
    return "\n\n".join([*tables, caption])


def _rules(sections: Sections) -> str:
    """How rates and decays were chosen."""
    if not any("decay" in run for run in sections.values() if run["rate"] is not None):
        return (
            "The learning rate is the best of four by the training error at the end of a quarter "
            "of the time, with one seed, and falls linearly to 0 over the time."
        )
    return (
        "The learning rate is the best of four, and the part of the time over which it falls to 0 "
        "the best of three, by the time to the training error or, where no try reaches it, by the "
        "training error at the end, with another seed."
    )


def _grids(sections: Sections, methods: dict[str, Method]) -> str:
    """The learning rates that were tried first, by method."""
    found: dict[str, set[float]] = {}
    for name, run in sections.items():
        _, method, ending = name.split(".", 2)
        if ending.startswith("rate-") and method in methods:
            found.setdefault(method, set()).add(run["rate"])
    return "; ".join(
        f"{methods[method].title}: {', '.join(f'{rate:g}' for rate in sorted(found[method]))}"
        for method in methods
        if method in found
    )


def _race_table(sections: Sections, name: str, race: Race, methods: dict[str, Method]) -> str:
    shown = {
        method: runs
        for method, described in methods.items()
        if _takes_part(described, name) and (runs := seeds_of(sections, name, method))
    }
    missing = [
        described.title
        for method, described in methods.items()
        if _takes_part(described, name) and method not in shown
    ]
    columns: dict[str, Callable[[str, list[Section]], str]] = {
        "method": lambda method, runs: methods[method].title,
        "rate": lambda method, runs: _rate(runs),
        "decay": lambda method, runs: _decay(runs),
        f"training error {race.train:g}": lambda method, runs: _time(runs, "train"),
        "of KSD": lambda method, runs: _relative(sections, name, method, "train"),
        f"test error {race.test:g}": lambda method, runs: _time(runs, "test"),
        # A space more, for a head that is there twice.
        "of KSD ": lambda method, runs: _relative(sections, name, method, "test"),
        "errors at the end (training / test)": lambda method, runs: _errors(runs),
        "lowest test error": lambda method, runs: _lowest(runs),
        "passes a second": lambda method, runs: _passes(runs),
        FIRST_STEPS: lambda method, runs: _first_steps(runs),
    }
    # Records of earlier versions do not have them.
    every = [run for runs in shown.values() for run in runs]
    for column, key in (("decay", "decay"), (FIRST_STEPS, "first_steps_seconds")):
        if all(run.get(key) is None for run in every):
            del columns[column]
    batch = f"mini-batches of {race.batch_size:,}"
    parts = [f"**{race.title}**, {race.seconds:g} s, {batch}"]
    if shown:
        rows = [[show(*item) for show in columns.values()] for item in shown.items()]
        parts.append(markdown([[head.strip() for head in columns], *rows]))
    if missing:
        parts.append(f"Missing: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _takes_part(method: Method, race: str) -> bool:
    return method.kind is None or race in FIRST_RACES


def _rate(runs: list[Section]) -> str:
    rate = runs[0]["rate"]
    return "–" if rate is None else f"{rate:.3g}"


def _decay(runs: list[Section]) -> str:
    """The part of the time over which the rate falls."""
    decay = runs[0].get("decay")
    return "–" if decay is None else DECAYS[decay]


def _passes(runs: list[Section]) -> str:
    found = [run["last"]["passes"] / run["last"]["seconds"] for run in runs]
    return f"{statistics.median(found):.3g}"


def _first_steps(runs: list[Section]) -> str:
    found = [run["first_steps_seconds"] for run in runs if run.get("first_steps_seconds")]
    return f"{found[0]:.2f}" if found else "–"


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
    return f"{statistics.median(_lowest_test(run) for run in runs):.3g}"


def _lowest_test(run: Section) -> float:
    if "lowest_test" in run:
        return float(run["lowest_test"])
    column = KEYS.index("test")
    return min(float(row[column]) for row in run["curve"] if row[column] is not None)


def _errors(runs: list[Section]) -> str:
    shown = []
    for error in ("train", "test"):
        found = [run["last"][error] for run in runs]
        finite = [value for value in found if value is not None]
        shown.append(f"{statistics.median(finite):.3g}" if finite else "NaN")
    return " / ".join(shown)
