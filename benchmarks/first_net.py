"""The README's own net: how far KSD and other methods bring it, second by second."""

import copy
import math
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.environment import sentence
from benchmarks.figures import Line, draw
from benchmarks.parts import NOT_MEASURED, Figure, Part, Section, Sections, Setting, markdown
from benchmarks.physics.methods import METHODS
from benchmarks.physics.objective import Terms
from benchmarks.road.methods import Setting as Choice
from krylov_descent.laboratory.physics.equation import on_device

README = Path(__file__).parents[1] / "README.md"
CHOSEN = ("ksd", "lbfgs", "adam", "hf")
SECONDS = 10.0
# Of the table.
MARKS = (1.0, 3.0, 10.0)
# The error is measured, outside of the clock, when the clock has gone on by this part of itself.
RESOLUTION = 0.03


def code() -> str:
    """The first Python code of the README."""
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def net_and_terms() -> tuple[nn.Sequential, Terms]:
    """The net and the terms that the README makes, before they are trained."""
    before = torch.get_default_dtype()
    made: dict[str, Any] = {}
    try:
        exec(code().partition("optimizer = ")[0], made)
    finally:
        torch.set_default_dtype(before)
    return made["net"], made["terms"]


def error(net: nn.Module) -> float:
    """The largest deviation from the solution, sin πx + ½ sin 4πx."""
    x = torch.linspace(0, 1, 1000, dtype=torch.float64)[:, None]
    exact = torch.sin(math.pi * x) + 0.5 * torch.sin(4 * math.pi * x)
    with torch.no_grad():
        return float((copy.deepcopy(net).cpu()(x) - exact).abs().max())


def run(
    method: str, choice: Choice, device: torch.device, seconds: float = SECONDS
) -> list[tuple[float, float]]:
    """(seconds, error) along a training."""
    net, terms = net_and_terms()
    step = METHODS[method].make(net.to(device), on_device(terms, device), choice)
    passed, measured, curve = 0.0, 0.0, [(0.0, error(net))]
    while passed < seconds:
        started = time.perf_counter()
        step(max(0.0, 1 - passed / seconds))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        passed += time.perf_counter() - started
        if passed > (1 + RESOLUTION) * measured or passed >= seconds:
            measured = passed
            curve.append((round(passed, 4), float(f"{error(net):.3g}")))
    return curve


def names(device: torch.device) -> list[str]:
    """The methods."""
    del device
    return list(CHOSEN)


def measure(section: str, setting: Setting) -> Section:
    """The curve of a method with the best of its settings, which tell by the last error."""
    METHODS[section].require(0)
    choices, device = METHODS[section].settings, setting.device
    run(section, choices[0], device, 0.1)  # what libraries do at their first call is nobody's time
    curves = [(choice, run(section, choice, device)) for choice in choices]
    choice, curve = min(curves, key=lambda found: found[1][-1][1])
    return {"setting": choice, "curve": curve}


def table(sections: Sections, device: torch.device) -> str:
    """The errors after some seconds."""
    del device
    if not sections:
        return NOT_MEASURED
    rows = [["error after", *(METHODS[m].title for m in CHOSEN if m in sections)]]
    for mark in MARKS:
        found = [_error_at(sections[m]["curve"], mark) for m in CHOSEN if m in sections]
        rows.append([f"{mark:g} s", *(f"{e:.0e}" for e in found)])
    environments = [section["environment"] for section in sections.values()]
    rate = sections["adam"]["setting"]["rate"] if "adam" in sections else None
    note = f" Adam has the best of four rates, {rate:g}, which falls to 0." if rate else ""
    return f"{markdown(rows)}\n\nThe largest error.{note} {sentence(*environments)}, float64."


def _error_at(curve: list[list[float]], mark: float) -> float:
    """Of the last step that ended before the mark."""
    return [found for seconds, found in curve if seconds <= mark][-1]


def figure(sections: Sections, device: torch.device, path: Path) -> None:
    """The curves."""
    del device
    lines = [
        Line(METHODS[m].title, *zip(*sections[m]["curve"][1:], strict=True))
        for m in CHOSEN
        if m in sections
    ]
    draw(path, {"largest error of the solution": lines}, x_label="seconds")


PART = Part(
    sections=names,
    measure=measure,
    tables={"": table},
    figures={"first-net": Figure("The error of the README's net over time", figure)},
    kept=True,
)
