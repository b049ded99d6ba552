"""Curves as SVG files for the pages; the same results give the same file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

# Told apart without colour.
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
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

    figure = Figure(figsize=(5.4 * len(panels), 4.2), layout="constrained")
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
        axes.legend(fontsize="small")
    with mpl.rc_context({"svg.hashsalt": SALT, "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})
