"""The rounding noise of a gradient: it tells the end of a training from a search that is stuck."""

import torch
from torch import Tensor

from krylov_descent.objective.batches import Samples
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.objective import Objective


def gradient_noise(
    objective: Objective, samples: Samples, theta: Tensor, generator: torch.Generator
) -> float:
    """How far the gradient moves when each parameter is moved by its own rounding, up or down.

    A gradient no longer than that says nothing: the parameters cannot be told from others whose
    gradient is zero.

    Args:
        objective: f.
        samples: to take the gradient over.
        theta: θ [n], where the parameters are, before and after.
        generator: of the signs, in the same state on every rank.

    Cost: two gradients over the samples, and a few vectors [n].
    """
    signs = torch.randint(0, 2, theta.shape, generator=generator).to(theta) * 2 - 1
    try:
        here = objective.value_and_gradient(samples).gradient.clone()
        objective.parameters.assign(theta * (1 + torch.finfo(theta.dtype).eps * signs))
        there = objective.value_and_gradient(samples).gradient
    finally:
        objective.parameters.assign(theta)
    return objective.ranks.agreed_number(length(there - here))
