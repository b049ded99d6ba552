"""Seconds and peak memory of a KSD step as one of its sizes grows and the others stay.

The sizes are n, the number of parameters; N = |A|; K; |B|; |C|. The network is four square Linear
layers with tanh between them. On a CPU each point is measured in a process of its own, so that its
memory can be told from what others left behind.
"""

import json
import math
import sys
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peak
from benchmarks.environment import sentence
from benchmarks.figures import Line, draw
from benchmarks.parts import Figure, Part, Section, Sections, Setting, markdown
from benchmarks.timing import show, spread, timed
from krylov_descent import KSD

DEPTH = 4
WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Point:
    """The sizes of a step."""

    n: int
    N: int
    K: int
    B: int
    C: int

    @property
    def width(self) -> int:
        """Of the layers, so that they have about n weights together."""
        return max(2, round(math.sqrt(self.n / DEPTH)))


BASES = {
    "cpu": Point(n=100_000, N=2_000, K=20, B=500, C=500),
    "cuda": Point(n=1_000_000, N=10_000, K=20, B=1_000, C=1_000),
}
AXES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {
        "n": (10_000, 100_000, 1_000_000, 10_000_000),
        "N": (1_000, 2_000, 4_000, 8_000),
        "K": (5, 10, 20, 40, 80),
        "B": (250, 500, 1_000, 2_000),
        "C": (250, 500, 1_000, 2_000),
    },
    "cuda": {
        "n": (10_000, 100_000, 1_000_000, 10_000_000, 100_000_000),
        "N": (2_000, 10_000, 50_000, 250_000),
        "K": (5, 10, 20, 40, 80),
        "B": (250, 1_000, 4_000, 10_000),
        "C": (250, 1_000, 4_000, 10_000),
    },
}
AXIS_TITLES = {
    "n": "n, parameters",
    "N": "N = \\|A\\|",
    "K": "K",
    "B": "\\|B\\|",
    "C": "\\|C\\|",
}


def sections(device: torch.device) -> list[str]:
    """One per size that grows."""
    return list(AXES[device.type])


def measure(section: str, setting: Setting) -> Section:
    """All points along an axis."""
    device = setting.device
    base = BASES[device.type]
    rows = []
    for value in AXES[device.type][section]:
        point = replace(base, **{section: value})
        # The largest takes seconds a step; its spread is small.
        rows.append(measure_point(point, device, setting.repeats))
        seconds = rows[-1]["seconds"]["median"]
        print(f"{section} = {value:,}: {1e3 * seconds:.1f} ms a step", flush=True)
    return {"axis": section, "base": asdict(base), "repeats": setting.repeats, "rows": rows}


def measure_point(point: Point, device: torch.device, repeats: int) -> dict[str, Any]:
    """One point; on a CPU in a fresh process."""
    if device.type == "cuda":
        take_first_steps(device)
        return steps_of(point, device, repeats)
    peak.require(device)
    case = {"point": asdict(point), "device": device.type, "repeats": repeats}
    case["threads"] = torch.get_num_threads()
    found: dict[str, Any] = peak.in_own_process("benchmarks.growth", case)
    return found


@cache
def take_first_steps(device: torch.device) -> None:
    """Have code and workspaces loaded, which is nobody's time or memory."""
    steps_of(Point(n=1_000, N=20, K=2, B=5, C=5), device, 1)


def steps_of(point: Point, device: torch.device, repeats: int) -> dict[str, Any]:
    """Warm steps: their seconds, and the most memory beyond model and data that any took."""
    model, data = _problem(point, device)
    before = peak.start(device)
    sizes = point.B, point.C
    optimizer = KSD(model, nn.MSELoss(), dimension=point.K, subset_size=sizes, previous_steps=1)
    for _ in range(WARM_UPS):
        optimizer.step(data)
    timings = [timed(lambda: optimizer.step(data), device) for _ in range(repeats)]
    used = peak.highest(device) - before
    return {
        **asdict(point),
        "parameters": optimizer.objective.parameters.numel,
        "seconds": spread([seconds for seconds, _ in timings]),
        "evaluations": spread([result.evaluations for _, result in timings]),
        "bytes": used,
    }


def _problem(point: Point, device: torch.device) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A smooth function of few directions, so that the search has something to find."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        width = point.width
        layers = [nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(DEPTH)]
        model = nn.Sequential(*layers).to(device)
        directions = torch.randn(8, width).to(device)
    codes = torch.sin(torch.arange(point.N * 8, device=device, dtype=torch.float32))
    inputs = torch.tanh(codes.reshape(point.N, 8) @ directions)
    return model, (inputs, inputs.roll(1, dims=1).square())


def table(sections: Sections, device: torch.device) -> str:
    """One row per point."""
    rows = [["what grows", "to", "ms a step", "evaluations", "peak memory, MiB"]]
    there = [axis for axis in AXES[device.type] if axis in sections]
    for axis in there:
        for row in sections[axis]["rows"]:
            milliseconds = {key: 1e3 * value for key, value in row["seconds"].items()}
            rows.append(
                [
                    AXIS_TITLES[axis],
                    f"{row[axis]:,}",
                    show(milliseconds),
                    f"{row['evaluations']['median']:.0f}",
                    f"{row['bytes'] / 2**20:,.0f}",
                ]
            )
    rows += [
        [AXIS_TITLES[axis], "*not measured yet*", "", "", ""]
        for axis in AXES[device.type]
        if axis not in sections
    ]
    one = sections[there[0]]
    base = Point(**one["base"])
    caption = (
        f"Warm KSD steps, median of {one['repeats']} (lowest to highest), and peak memory beyond "
        f"the model and the data. What does not grow is n = {base.n:,}, N = {base.N:,}, "
        f"K = {base.K}, \\|B\\| = {base.B:,}, \\|C\\| = {base.C:,}. {DEPTH} square layers. "
        f"{sentence(*(sections[axis]['environment'] for axis in there))}."
    )
    return f"{markdown(rows)}\n\n{caption}"


def figure(sections: Sections, device: torch.device, path: Path) -> None:
    """Seconds and memory over each size."""
    axes = [axis for axis in AXES[device.type] if axis in sections]
    lines: dict[str, list[Line]] = {"seconds a step": [], "peak memory, GiB": []}
    for axis in axes:
        rows = sections[axis]["rows"]
        # Over the size relative to its smallest: one picture for all.
        sizes = [row[axis] / rows[0][axis] for row in rows]
        name = AXIS_TITLES[axis].replace("\\", "")
        medians = [row["seconds"]["median"] for row in rows]
        lines["seconds a step"].append(Line(name, sizes, medians))
        lines["peak memory, GiB"].append(Line(name, sizes, [row["bytes"] / 2**30 for row in rows]))
    draw(path, lines, x_label="times its smallest value")


PART = Part(
    sections=sections,
    measure=measure,
    tables={"": table},
    figures={"growth": Figure("Seconds and memory of a step as it grows", figure)},
)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    take_first_steps(torch.device("cpu"))
    print(json.dumps(steps_of(Point(**asked["point"]), torch.device("cpu"), asked["repeats"])))
