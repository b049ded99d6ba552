"""The Krylov subspace: its basis V, however that is kept, and the curvature between its vectors."""

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Placement, Storage, StoredBasis
from krylov_descent.algorithms.krylov import Product, fill_with_krylov_space, found_on_host
from krylov_descent.algorithms.metric import Metric


class Subspace:
    """Vectors that are orthonormal in D, and the curvature between them.

    Args:
        rows: V as r rows, r ≤ K + m with m previous steps.
        placement: which part of each vector this rank keeps.
        curvature: H̄ = VᵀHV [r, r], float64 on the CPU, symmetric. Not finite where a product was
            not.
        gram: VᵀV [r, r], in the precision of vectors, on the CPU.
        kept: as which of K + m the rows were made, before those that vanished were left out.
    """

    def __init__(
        self,
        rows: StoredBasis,
        placement: Placement,
        curvature: Tensor,
        gram: Tensor,
        kept: list[int],
    ) -> None:
        self.rows, self.placement = rows, placement
        self.curvature, self.gram, self.kept = curvature, gram, kept

    @property
    def rank(self) -> int:
        """How many independent directions there are."""
        return self.rows.count

    def combine(self, coefficients: Tensor) -> Tensor:
        """V c as a vector [n], for small c [r] (float64, CPU)."""
        here = coefficients.to(self.rows.device, self.rows.dtype)
        return self.placement.whole(self.rows.combine(slice(0, self.rank), here))

    def project(self, vector: Tensor) -> Tensor:
        """This rank's part of Vᵀ(the sum over ranks of vectors), [r] in float64 on the CPU.

        The parts of all ranks add up to the whole. May overwrite the vector.
        """
        part = self.placement.to_project(vector)
        return self.rows.times(slice(0, self.rank), part).to("cpu", torch.float64)


def krylov_basis(
    product: Product,
    metric: Metric,
    gradient: Tensor,
    previous_steps: list[Tensor],
    dimension: int,
    *,
    placement: Placement,
    storage: Storage,
) -> Subspace:
    """Algorithm 2.

    Args:
        product: v [n] → this rank's part of Hv [n], which add up over ranks.
        metric: D on the part of a vector that the placement keeps.
        gradient: g [n], finite and not zero, the same on all ranks.
        previous_steps: m vectors [n], which join as the last directions in this order. Emptied.
        dimension: K, the dimension of the Krylov part.
        placement: which part of each vector this rank keeps.
        storage: how it is kept.

    Rows in bfloat16 are rounded after they were orthogonalised; products and H̄ are of the rounded
    rows, so that the subspace is what is stored, and orthogonal to about its rounding over √n.

    Memory: K + m vectors, and three while it is made; with `Images` K + m more.
    """
    slots = min(dimension, gradient.numel()) + len(previous_steps)
    rows = StoredBasis(slots, placement.size, gradient, storage)
    found = fill_with_krylov_space(rows, product, metric, gradient, previous_steps, placement)
    return cut(rows, placement, found)


def cut(rows: StoredBasis, placement: Placement, found: Tensor) -> Subspace:
    """The subspace without the rows that vanished, which are left out in place.

    Args:
        rows: some of them zero.
        placement: which part of each vector this rank keeps.
        found: what `fill_with_krylov_space` returned for them.
    """
    kept, curvature, gram = found_on_host(found)
    for slot, row in enumerate(kept):
        if slot != row:
            rows.move(row, slot)
    rows.cut(len(kept))
    return Subspace(rows, placement, curvature, gram, kept)
