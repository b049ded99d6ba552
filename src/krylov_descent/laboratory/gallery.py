"""Pictures of what the networks of recorded runs have learnt."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from krylov_descent.laboratory.checkpoint import load_checkpoint
from krylov_descent.laboratory.physics.equation import PICTURE
from krylov_descent.laboratory.physics.equations import EQUATIONS
from krylov_descent.laboratory.problems.equations import METRIC
from krylov_descent.laboratory.problems.problem import SQUARED_ERROR, Problem
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.report import Field, Picture, Reconstructions

IMAGES = 12
# From a network's outputs, on the CPU.
Draw = Callable[[Tensor], Picture]


def has_picture(folder: RunFolder) -> bool:
    """Whether a run left a network to make a picture of, told before any data are loaded."""
    if not folder.checkpoint.exists():
        return False
    try:
        problem = folder.config().get("problem", {})
    except ValueError:
        return False  # the page says that it is damaged
    return problem.get("metric", {}).get("name") in DRAWN


@torch.no_grad()
def pictures(problem: Problem, folders: Iterable[RunFolder]) -> dict[Path, Picture]:
    """What each run's network makes of a few test images, or of the solution of its equation.

    Empty for other problems; a run without checkpoint is left out. The network is that of the
    lowest validation error.
    """
    if problem.metric.name not in DRAWN:
        return {}
    inputs, draw = DRAWN[problem.metric.name](problem)
    model = problem.make_model(0, "torch", inputs.device, inputs.dtype)
    found = {}
    for folder in folders:
        if folder.checkpoint.exists():
            state = load_checkpoint(folder.checkpoint, inputs.device)
            model.load_state_dict(state["best"].get("model", state["model"]))
            found[folder.path] = draw(model(inputs).cpu())
    return found


def _images(problem: Problem) -> tuple[Tensor, Draw]:
    """A few test images, and what draws what becomes of them."""
    inputs = problem.test[0][:IMAGES]
    return inputs, lambda outputs: Reconstructions(inputs.cpu(), outputs.sigmoid())


def _plane(problem: Problem) -> tuple[Tensor, Draw]:
    """The points of the picture of a solution, and what draws it."""
    equation = EQUATIONS[problem.name]
    points = equation.plane()
    solution = equation.solution(points).view(PICTURE)
    first, last = equation.axes
    others = ", the others in the middle" if points.shape[1] > 2 else ""
    text = f"{first} to the right, {last} upwards{others}"
    inputs = points.to(problem.test[0].device)
    return inputs, lambda outputs: Field(solution, outputs.view(PICTURE), text)


# By the name of the metric: autoencoders of pixels in [0, 1] and equations have their own.
DRAWN: dict[str, Callable[[Problem], tuple[Tensor, Draw]]] = {
    SQUARED_ERROR.name: _images,
    METRIC: _plane,
}
