"""What the networks of recorded runs make of a few test images."""

from collections.abc import Iterable
from pathlib import Path

import torch

from krylov_descent.laboratory.checkpoint import load_checkpoint
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.report import Reconstructions

IMAGES = 12


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
