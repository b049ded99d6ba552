"""Residuals and their Jacobian, for a loss that is a sum of squares.

With a diagonal H_E ≥ 0, as squares have it, JᵀH_E J = J̃ᵀJ̃ and g = J̃ᵀr for the rows J̃ = √H_E J and
the residuals r = H_E^(-1/2) ∂E/∂z. They have the weights of their terms in them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from krylov_descent.curvature.kept_jacobian import MakeRoom, jacobian
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network


class ResidualRows(NamedTuple):
    """The residuals of a batch, and their rows.

    Attributes:
        matrix: J̃ [m, n].
        residuals: r [m].
    """

    matrix: Tensor
    residuals: Tensor


def residual_rows(network: Network, batch: Batch, room: MakeRoom = torch.empty) -> ResidualRows:
    """The residuals of a batch, scaled so that Σ nᵢ is ½‖r‖² there.

    Args:
        network: model and loss, whose H_E is diagonal and not negative.
        batch: the samples.
        room: makes memory for J.

    Cost: about three gradients for each output of a sample, and m·n numbers.

    Raises:
        NoJacobianError: the rows cannot be had from linear functions.
    """
    found = jacobian(network, batch, room)
    outputs = found.pieces
    for z in outputs:
        z.requires_grad_()
    slopes = torch.autograd.grad(network.losses_of(found.outputs, batch).sum(), outputs)
    slope = torch.cat([z.reshape(-1) for z in slopes])
    roots = found.curved(torch.ones_like(slope)).sqrt()
    # A term of weight zero has neither a slope nor curvature.
    residuals = torch.where(roots > 0, slope / roots, 0)
    return ResidualRows(found.matrix.mul_(roots[:, None]), residuals)
