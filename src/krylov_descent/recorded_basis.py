"""The basis of a step as one CUDA graph: all products, preconditioning and orthogonalisation."""

from functools import partial

import torch
from torch import Tensor

from krylov_descent.batches import Batch
from krylov_descent.curvature import CurvatureProduct
from krylov_descent.network import Network
from krylov_descent.preconditioner import InPlace, Preconditioner
from krylov_descent.subspace import Subspace, cut, krylov_slots

# That there are two directions before it makes the third one like all that follow.
REHEARSED = 3


def recorded_basis(
    product: CurvatureProduct,
    preconditioner: Preconditioner,
    gradient: Tensor,
    previous_steps: list[Tensor],
    dimension: int,
) -> Subspace | None:
    """What `krylov_basis` gives, by one launch; None where that is not possible.

    Not where B does not fit one micro-batch, nor with a preconditioner whose tensors move.

    Args:
        product: v → Hv, not used before.
        preconditioner: D.
        gradient: g [n].
        previous_steps: m vectors [n]; as many at every step.
        dimension: K.
    """
    batch = product.single_batch
    if batch is None or not isinstance(preconditioner, InPlace):
        return None

    def build(
        directions: int,
        network: Network,
        batch: Batch,
        gradient: Tensor,
        scale: Tensor,
        *previous_steps: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        products, joining = product.over(network, batch, scale), list(previous_steps)
        return krylov_slots(products, preconditioner, gradient, joining, directions)

    recordings = product.objective.recordings
    recording = recordings.load(
        f"basis of {product.kind} in {dimension}",
        partial(build, dimension),
        batch,
        gradient,
        torch.tensor(product.scale, dtype=gradient.dtype, device=gradient.device),
        *previous_steps,
        fixed=preconditioner.tensors,
        rehearsal=partial(build, min(REHEARSED, dimension)),
    )
    if recording is None:
        return None
    slots, *found = recording()
    if not recordings.hold(batch):
        return None
    product.products += len(slots)
    return cut(slots, *found, stays=True)
