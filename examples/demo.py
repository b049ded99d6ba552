"""KSD, L-BFGS and Adam on a small autoencoder of curves: the same start, the same seconds each.

`make demo` runs it, about a minute in all. It writes two pictures into `demo/`: the training error
against time, and some reconstructions.
"""

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.laboratory.initialization import initialize
from krylov_descent.laboratory.models import autoencoder
from krylov_descent.laboratory.problems.curves import SIDE, draw_curves

SECONDS = 19.0
IMAGES, NEW_IMAGES, SIZES = 4000, 1000, (196, 64, 32, 6)
SHOWN = 10
# Distinct for colour-blind eyes and in grey.
COLOURS = {"KSD": "#0072B2", "L-BFGS": "#D55E00", "Adam": "#009E73"}
# Cross-entropy, summed over the pixels; its mean over the images is what all three minimise.
LOSS = nn.BCEWithLogitsLoss(reduction="sum")

# Makes progress for a moment each time it is asked; gets the fraction of the time that is used.
Method = Callable[[nn.Module, Tensor], Callable[[float], object]]


@dataclass
class Run:
    """A method's way: seconds spent and the training error then."""

    name: str
    model: nn.Module
    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)


def ksd(model: nn.Module, images: Tensor) -> Callable[[float], object]:
    """Nothing to tune."""
    optimizer = KSD(model, LOSS)
    return lambda used: optimizer.step((images, images))


def lbfgs(model: nn.Module, images: Tensor) -> Callable[[float], object]:
    """On all images, with strong Wolfe line searches and a history of 10."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=5, history_size=10, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        loss = LOSS(model(images), images) / len(images)
        loss.backward()
        return float(loss.detach())

    return lambda used: optimizer.step(closure)


def adam(model: nn.Module, images: Tensor) -> Callable[[float], object]:
    """The best of three rates and batches tried here; the rate falls linearly to zero."""
    rate, batch = 2e-2, 100
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)

    def epoch(used: float) -> None:
        optimizer.param_groups[0]["lr"] = rate * (1 - used)
        for indices in torch.randperm(len(images), generator=generator).split(batch):
            optimizer.zero_grad()
            part = images[indices]
            (LOSS(model(part), part) / len(part)).backward()
            optimizer.step()

    return epoch


METHODS: dict[str, Method] = {"KSD": ksd, "L-BFGS": lbfgs, "Adam": adam}


def small_curves(count: int, stream: int) -> Tensor:
    """Images of CURVES (re-created) at half the size, [count, 196]."""
    images = draw_curves(count, seed=0, stream=stream).view(-1, 1, SIDE, SIDE)
    return nn.functional.avg_pool2d(images, 2).flatten(1)


@torch.no_grad()
def squared_error(model: nn.Module, images: Tensor) -> float:
    """Per image, summed over the pixels."""
    return float((model(images).sigmoid() - images).square().sum(1).mean())


def train(name: str, model: nn.Module, images: Tensor, limit: float) -> Iterator[Run]:
    """Train for `limit` seconds; the time to find the error does not count."""
    run = Run(name, copy.deepcopy(model), [0.0], [squared_error(model, images)])
    start = time.perf_counter()
    advance = METHODS[name](run.model, images)
    used = time.perf_counter() - start
    while used < limit:
        start = time.perf_counter()
        advance(used / limit)
        used += time.perf_counter() - start
        run.seconds.append(used)
        run.errors.append(squared_error(run.model, images))
        yield run


def draw_errors(runs: list[Run], path: Path) -> None:
    """Training error against seconds, every curve with its name at its end."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        axes.plot(run.seconds, run.errors, color=COLOURS[run.name], linewidth=2)
    end = max(run.seconds[-1] for run in runs)
    height = -math.inf  # of the label below, in decades: labels must not overlap
    for run in sorted(runs, key=lambda run: run.errors[-1]):
        colour, error = COLOURS[run.name], run.errors[-1]
        height = max(math.log10(error), height + 0.1)
        text = f"{run.name}  {error:.2f}"
        axes.text(1.02 * end, 10**height, text, va="center", color=colour, fontweight="bold")
    axes.set_yscale("log")
    axes.set_xlim(0, 1.2 * end)
    axes.spines["bottom"].set_bounds(0, end)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= end])
    axes.set_xlabel("seconds")
    axes.set_ylabel("squared error per training image")
    network = "-".join(map(str, SIZES))
    title = f"Autoencoder {network} mirrored, {IMAGES:,} images of curves, one CPU thread"
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(which="major", alpha=0.4)
    axes.grid(which="minor", alpha=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


@torch.no_grad()
def draw_reconstructions(runs: list[Run], images: Tensor, path: Path) -> None:
    """A row of inputs, and below it what each method made of them."""
    rows = {"input": images} | {run.name: run.model(images).sigmoid() for run in runs}
    figure = Figure(figsize=(1.0 * SHOWN + 0.9, 1.06 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), SHOWN)
    for (name, row), line in zip(rows.items(), grid, strict=True):
        for image, axes in zip(row, line, strict=True):
            axes.imshow(image.view(SIDE // 2, SIDE // 2).numpy(), cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_alpha(0.3)
        colour = COLOURS.get(name, "black")
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", color=colour, fontsize=12)
    figure.savefig(path, dpi=150)


def main(seconds: float, folder: Path) -> list[Run]:
    """Train, draw, and print the end."""
    images, new_images = small_curves(IMAGES, stream=0), small_curves(NEW_IMAGES, stream=2)
    model = autoencoder(SIZES)
    initialize(model, "sparse", seed=0)
    runs = []
    for name in METHODS:
        for run in train(name, model, images, seconds):
            line = (
                f"{name:7} {run.seconds[-1]:5.1f} of {seconds:.0f} s | error {run.errors[-1]:.3f}"
            )
            if sys.stdout.isatty():
                print(f"\r{line:<60}", end="", flush=True)
        print(f"\r{line:<60}")
        runs.append(run)
    print(f"\n{'':7} {'calls':>6} {'training error':>15} {'on new images':>15}")
    for run in runs:
        new = squared_error(run.model, new_images)
        print(f"{run.name:7} {len(run.errors) - 1:6} {run.errors[-1]:15.3f} {new:15.3f}")
    folder.mkdir(parents=True, exist_ok=True)
    draw_errors(runs, folder / "loss.png")
    draw_reconstructions(runs, new_images[:SHOWN], folder / "reconstructions.png")
    print(f"\nPictures: {folder / 'loss.png'}, {folder / 'reconstructions.png'}")
    return runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each method")
    parser.add_argument("--folder", type=Path, default=Path("demo"), help="for the pictures")
    options = parser.parse_args()
    # Matrices this small gain little from a second thread, and two threads lose much when another
    # program takes one of two cores.
    torch.set_num_threads(1)
    main(options.seconds, options.folder)
