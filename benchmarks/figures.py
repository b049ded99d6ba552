"""Curves as SVG files for the pages; the same results give the same file."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

# Told apart without colour as far as that goes; of two lines of one colour, the first and the
# eleventh, they differ.
DASHES = ("-", "--", "-.", ":")
CROWDED = 6  # lines; with more the legend stands beside the panels, once, and not on them
SALT = "krylov-descent"  # identifiers in the file depend on it, and on chance without it


@dataclass(frozen=True)
class Line:
    """One curve."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def draw(
    path: Path,
    panels: Mapping[str, Sequence[Line]],
    *,
    x_label: str,
    y_scale: Literal["log", "linear"] = "log",
    steps: bool = False,
    levels: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Panels side by side by their vertical label, over a logarithmic horizontal axis.

    `steps` draws stairs; `levels` are thin horizontal lines, by panel.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    names = [[line.name for line in lines] for lines in panels.values()]
    beside = len(names[0]) > CROWDED and all(other == names[0] for other in names)
    size = (5.4 * len(panels) + 2.2 * beside, 4.2)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasSVG(figure)
    for index, (label, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for number, line in enumerate(lines):
            style = DASHES[number % len(DASHES)]
            if steps:
                axes.step(line.x, line.y, where="post", linestyle=style, label=line.name)
            else:
                axes.plot(line.x, line.y, linestyle=style, label=line.name)
        if label in levels:
            axes.axhline(levels[label], color="grey", linewidth=0.8)
        axes.set(xlabel=x_label, ylabel=label, xscale="log", yscale=y_scale)
        axes.grid(visible=True, which="both", alpha=0.25)
        if not beside:
            axes.legend(fontsize="small")
    if beside:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize="small", loc="outside right upper")
    with mpl.rc_context({"svg.hashsalt": SALT, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def draw_profile(path: Path, ratios: Mapping[str, Sequence[float]]) -> None:
    """Dolan and Moré's performance profile: the part of targets reached within τ times the best.

    Args:
        path: of the SVG file.
        ratios: of each method, its time to each target over the best method's; infinity where it
            did not reach the target.
    """
    lines = []
    finite = [value for values in ratios.values() for value in values if value < math.inf]
    end = 1.2 * max([10.0, *finite])
    for name, values in ratios.items():
        x = [1.0, *sorted(value for value in values if value < math.inf), end]
        counts = [sum(value <= at for value in values) / len(values) for at in x]
        lines.append(Line(name, x, counts))
    draw(
        path,
        {"part of the targets reached": lines},
        x_label="times the fastest method's time",
        y_scale="linear",
        steps=True,
    )
