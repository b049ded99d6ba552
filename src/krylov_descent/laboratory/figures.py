"""Convergence curves as a picture, the way the paper draws them."""

from collections.abc import Mapping
from pathlib import Path

from krylov_descent.laboratory.record import RunFolder, explained

DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))


def draw_convergence(runs: Mapping[str, RunFolder], path: Path, *, title: str, error: str) -> None:
    """Training error over seconds, both logarithmic, one curve a run; missing runs are named.

    Args:
        runs: by the name in the legend.
        path: of the PNG.
        title: above the curves.
        error: what the vertical axis shows.

    Raises:
        RunFolderError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    there = False
    for index, (name, folder) in enumerate(runs.items()):
        # A logarithm has no place for the start or an error of zero.
        rows = [row for row in folder.rows() if row["seconds"] > 0 and row["train"] > 0]
        there = there or bool(rows)
        axes.plot(
            [row["seconds"] for row in rows],
            [row["train"] for row in rows],
            linestyle=DASHES[index % len(DASHES)],
            label=name if rows else f"{name} (missing)",
        )
    axes.set(title=title, xlabel="seconds of training", ylabel=error)
    if there:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    with explained(f"{path} cannot be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
