"""What the networks of recorded runs make of a few test images."""

from collections.abc import Iterable
from pathlib import Path

import torch

from krylov_descent.laboratory.checkpoint import load_checkpoint
from krylov_descent.laboratory.problems.problem import SQUARED_ERROR, Problem
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.report import Reconstructions

IMAGES = 12


def has_network_of_images(folder: RunFolder) -> bool:
    """Whether a run left an autoencoder to show images of, told before any data are loaded."""
    if not folder.checkpoint.exists():
        return False
    try:
        problem = folder.config().get("problem", {})
    except ValueError:
        return False  # the page says that it is damaged
    # The configuration has no task; only autoencoders are measured by the error per image.
    return bool(problem.get("metric", {}).get("name") == SQUARED_ERROR.name)


@torch.no_grad()
def reconstructions(problem: Problem, folders: Iterable[RunFolder]) -> dict[Path, Reconstructions]:
    """A few test images and what each run's network makes of them.

    Empty where the problem is no autoencoder; a run without checkpoint is left out. The network
    is that of the lowest validation error.
    """
    if problem.task != "autoencoder":
        return {}
    inputs = problem.test[0][:IMAGES]
    model = problem.make_model(0, "torch", inputs.device, inputs.dtype)
    found = {}
    for folder in folders:
        if folder.checkpoint.exists():
            state = load_checkpoint(folder.checkpoint, inputs.device)
            model.load_state_dict(state["best"].get("model", state["model"]))
            found[folder.path] = Reconstructions(inputs.cpu(), model(inputs).sigmoid().cpu())
    return found
