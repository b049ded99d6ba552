"""The rounding noise of a gradient, which tells a converged training from a stuck search."""

import torch
from torch import Tensor

from krylov_descent.objective.batches import Samples
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.objective import Objective


def gradient_noise(
    objective: Objective, samples: Samples, theta: Tensor, generator: torch.Generator
) -> float:
    """How far the gradient moves when each parameter is moved up or down by its rounding error.

    A gradient no longer than this noise carries no information: within rounding, the parameters
    equal others whose gradient is zero.

    Args:
        objective: f.
        samples: over which the gradient is taken.
        theta: θ [n], the current parameters, which are restored.
        generator: of the random signs, in the same state on every rank.

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
