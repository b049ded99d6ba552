"""The errors as a table, and what it shows."""

import math
import statistics
from collections import Counter

import torch

from benchmarks.environment import sentence
from benchmarks.parts import NOT_MEASURED, Sections, markdown
from benchmarks.physics.methods import DEFAULT, METHODS
from benchmarks.physics.running import MARKS, SEEDS, parsed
from krylov_descent.laboratory.physics.equations import EQUATIONS

# KSD should be first, or within this factor of the first.
NEAR = 3.0


def errors_of(sections: Sections, name: str, method: str) -> list[float]:
    """The median error at each mark over the seeds that were measured; empty if there are none.

    Infinity stands for an error that is not finite.
    """
    found = [
        [math.inf if error is None else error for error in section["errors"]]
        for key, section in sections.items()
        if parsed(key)[:2] == (name, method)
    ]
    return [statistics.median(at_mark) for at_mark in zip(*found, strict=True)]


def table(sections: Sections, device: torch.device) -> str:
    """The errors at each mark, by equation and method; a method without any has no column."""
    if not sections:
        return NOT_MEASURED
    marks = MARKS[device.type]
    measured = {parsed(key)[1] for key in sections}
    columns = [method for method in METHODS if method in measured]
    rows = [["equation", *(METHODS[method].title for method in columns)]]
    first, near, compared = [0] * len(marks), [0] * len(marks), 0
    for name, equation in EQUATIONS.items():
        found = {m: e for m in METHODS if (e := errors_of(sections, name, m))}
        if DEFAULT not in found:
            continue
        cells = [" → ".join(map(_text, found[m])) if m in found else "" for m in columns]
        rows.append([equation.title, *cells])
        if len(found) == 1:
            continue
        compared += 1
        for mark in range(len(marks)):
            best = min(errors[mark] for method, errors in found.items() if method != DEFAULT)
            first[mark] += found[DEFAULT][mark] <= best
            near[mark] += found[DEFAULT][mark] <= NEAR * best
    times = " and ".join(f"{mark:g}" for mark in marks)
    shown = "; ".join(
        f"after {mark:g} s KSD is first on {first[i]} of {compared} and within a factor of "
        f"{NEAR:g} of the first on {near[i]}"
        for i, mark in enumerate(marks)
    )
    runs = Counter(parsed(key)[2] for key in sections)
    counted = ", ".join(f"{runs[seed]} × seed {seed}" for seed in SEEDS if runs[seed])
    environments = [section["environment"] for section in sections.values()]
    caption = (
        f"Relative L2 error after {times} s of training, median of the seeds that were run "
        f"({counted}); – is not finite. {sentence(*environments)}."
    )
    return f"{markdown(rows)}\n\n{caption}\n\nOf the methods that were run, {shown}."


def _text(error: float) -> str:
    return "–" if error == math.inf else f"{error:.1e}"
