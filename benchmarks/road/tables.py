"""The road test as tables, what it must show, and the performance profile."""

import math
import statistics
from pathlib import Path

import torch

from benchmarks.environment import sentence
from benchmarks.figures import draw_profile
from benchmarks.parts import NOT_MEASURED, Section, Sections, markdown
from benchmarks.road.methods import BEST, DEFAULT, METHODS, methods_of
from benchmarks.road.problems import PROBLEMS
from benchmarks.road.running import LEVELS, SEEDS

# What default ÷ best of the grid should be at most, nearly everywhere and everywhere.
NEARLY, EVERYWHERE = 1.25, 2.0
MOST_REFUSED = 3


def median_time(section: Section, level: str) -> float:
    """Over the seeds; infinity where most of them did not reach the loss."""
    found = [run["reached"][level] for run in section["runs"]]
    return statistics.median(math.inf if seconds is None else seconds for seconds in found)


def times(sections: Sections, level: str) -> dict[str, dict[str, float]]:
    """Of each problem that KSD has run, the median time of each method that has."""
    found: dict[str, dict[str, float]] = {}
    for problem in PROBLEMS:
        if f"{problem}.{DEFAULT}" in sections:
            found[problem] = {
                method: median_time(sections[name], level)
                for method in METHODS
                if (name := f"{problem}.{method}") in sections
            }
    return found


def demanding_table(sections: Sections, device: torch.device) -> str:
    """Times to the demanding losses, and what the road test must show."""
    parts = [_table(sections, device, "demanding"), *_findings(sections)]
    return "\n\n".join(parts) if sections else NOT_MEASURED


def brief_table(sections: Sections, device: torch.device) -> str:
    """KSD beside the fastest of the others, to the demanding losses."""
    if not sections:
        return NOT_MEASURED
    rows = [["problem", "KSD", "fastest other", "its time"]]
    for problem, by_method in times(sections, "demanding").items():
        others = {m: seconds for m, seconds in by_method.items() if m not in (DEFAULT, BEST)}
        best = min(others, key=others.__getitem__, default=None)
        reached = best is not None and others[best] < math.inf
        name = METHODS[best].title if best is not None and reached else "none"
        cells = [_time(by_method[DEFAULT]), name, _time(others[best]) if best else "–"]
        rows.append([PROBLEMS[problem].title, *cells])
    environments = [section["environment"] for section in sections.values()]
    compared = [METHODS[m].title for m in methods_of(device.type) if m not in (DEFAULT, BEST)]
    caption = (
        f"Seconds to a demanding training loss, median of {len(SEEDS)} seeds; – was not reached. "
        f"The others are {', '.join(compared)}, those with a rate with the best of four. "
        f"{sentence(*environments)}."
    )
    return f"{markdown(rows)}\n\n{caption}"


def modest_table(sections: Sections, device: torch.device) -> str:
    """Times to the modest losses."""
    return _table(sections, device, "modest") if sections else NOT_MEASURED


def _table(sections: Sections, device: torch.device, level: str) -> str:
    methods = methods_of(device.type)
    rows = [["problem", "loss", *(METHODS[method].title for method in methods), "first"]]
    for problem, by_method in times(sections, level).items():
        target = sections[f"{problem}.{DEFAULT}"]["targets"][level]
        cells = [_time(by_method.get(method)) for method in methods]
        rows.append([PROBLEMS[problem].title, f"{target:.2g}", *cells, _first(by_method)])
    environments = [section["environment"] for section in sections.values()]
    seconds = {section["seconds"] for section in sections.values()}
    limits = " to ".join(f"{s:g}" for s in sorted({min(seconds), max(seconds)}))
    caption = (
        f"Seconds of training until the {level} loss is reached, median of {len(SEEDS)} seeds; – "
        f"was not reached within the problem's {limits} s. {sentence(*environments)}."
    )
    return f"{markdown(rows)}\n\n{caption}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "missing"
    return "–" if seconds == math.inf else f"{seconds:.2g}" if seconds < 1 else f"{seconds:.2f}"


def _first(by_method: dict[str, float]) -> str:
    compared = {method: seconds for method, seconds in by_method.items() if method != BEST}
    best = min(compared, key=compared.__getitem__)
    return METHODS[best].title if compared[best] < math.inf else "none"


def _findings(sections: Sections) -> list[str]:
    """What the road test must show, and what it shows."""
    found = times(sections, "demanding")
    ratios = [
        by_method[DEFAULT] / by_method[BEST]
        for by_method in found.values()
        if BEST in by_method and min(by_method[DEFAULT], by_method[BEST]) < math.inf
    ]
    first = sum(_first(by_method) == METHODS[DEFAULT].title for by_method in found.values())
    runs = [
        run
        for name, section in sections.items()
        if name.endswith(f".{DEFAULT}")
        for run in section["runs"]
    ]
    stuck = sum(run.get("refused", 0) > MOST_REFUSED for run in runs)
    nearly, everywhere = (sum(r <= most for r in ratios) for most in (NEARLY, EVERYWHERE))
    choices = "; ".join(
        f"{PROBLEMS[problem].title}: {_setting(sections[name]['chosen'])}"
        for problem in found
        if (name := f"{problem}.{BEST}") in sections
    )
    return [
        f"Defaults ÷ best of the grid, to the demanding loss: at most {NEARLY:g} on {nearly} of "
        f"{len(ratios)} problems that one of them solved, at most {EVERYWHERE:g} on {everywhere}. "
        f"KSD with its defaults is first on {first} of {len(found)}. Of its {len(runs)} runs "
        f"{stuck} had more than {MOST_REFUSED} refused steps in a row before their true end.",
        f"Best of the grid: {choices}." if choices else "",
    ]


def _setting(setting: dict[str, object]) -> str:
    return ", ".join(str(value) for value in setting.values())


def profile(sections: Sections, device: torch.device, path: Path) -> None:
    """The performance profile over both losses of all problems that every method has run."""
    peers = _peers(device)
    ratios: dict[str, list[float]] = {METHODS[method].title: [] for method in peers}
    for level in LEVELS:
        for by_method in times(sections, level).values():
            compared = [by_method.get(method) for method in peers]
            best = min((t for t in compared if t is not None), default=math.inf)
            if None in compared or best == math.inf:
                continue
            for method in peers:
                ratios[METHODS[method].title].append(by_method[method] / best)
    draw_profile(path, ratios)


def _peers(device: torch.device) -> list[str]:
    return [method for method in methods_of(device.type) if method != BEST]


def is_complete(sections: Sections) -> bool:
    """Whether some problem was run by every method that a CPU has."""
    peers = set(_peers(torch.device("cpu")))
    return any(peers <= set(by_method) for by_method in times(sections, LEVELS[0]).values())
