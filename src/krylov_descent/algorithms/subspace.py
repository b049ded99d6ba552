"""The Krylov subspace: its stored basis V, and the curvature projected on it."""

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Placement, Storage, StoredBasis
from krylov_descent.algorithms.growing_basis import GrowingBasis
from krylov_descent.algorithms.krylov import (
    Found,
    KrylovSpace,
    Product,
    fill_with_krylov_space,
    found_on_host,
)
from krylov_descent.algorithms.metric import Metric


class Subspace:
    """A basis V that is orthonormal in D, and the curvature projected on it.

    Args:
        rows: V as r rows, r ≤ K + m with m previous steps.
        placement: which part of each vector this rank stores.
        found: `curvature`, H̄ = VᵀHV [r, r], is not finite if a product was not. `kept` has the
            index of each row among the K + m directions, of which some may have vanished.
    """

    def __init__(
        self,
        rows: StoredBasis,
        placement: Placement,
        found: Found,
    ) -> None:
        self.rows, self.placement = rows, placement
        self.kept, self.curvature, self.gram, self.squared_gradient = found

    @property
    def rank(self) -> int:
        """r, the number of independent directions."""
        return self.rows.count

    def combine(self, coefficients: Tensor) -> Tensor:
        """Vc as a vector [n], for coefficients c [r] (float64, CPU)."""
        here = coefficients.to(self.rows.device, self.rows.dtype)
        return self.placement.whole(self.rows.combine(slice(0, self.rank), here))

    def project(self, vector: Tensor) -> Tensor:
        """This rank's summand of Vᵀ(the sum over ranks of vectors), [r] in float64 on the CPU.

        May overwrite the vector.
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
    """The Krylov basis by Algorithm 2.

    Args:
        product: v [n] → this rank's summand of Hv [n].
        metric: D on the part of a vector that the placement stores.
        gradient: g [n], finite and not zero, the same on all ranks.
        previous_steps: m vectors [n], which join as the last directions in this order. The list is
            emptied.
        dimension: K, the dimension of the Krylov part.
        placement: which part of each vector this rank stores.
        storage: the dtype and device of stored vectors.

    Rows in bfloat16 are rounded after orthogonalisation. Products and H̄ are those of the rounded
    rows, so the subspace is what is stored. The rounded rows are orthogonal to about their rounding
    over √n.

    Memory: K + m vectors, and three more while the basis is made. `MetricTimesBasis` may take
    K + m more.
    """
    krylov, previous = min(dimension, gradient.numel()), len(previous_steps)
    rows = StoredBasis(krylov + previous, placement.size, gradient, storage)
    space = KrylovSpace(GrowingBasis(rows), product, metric, gradient, placement)
    store_previous(rows, krylov, previous_steps, placement)
    return cut(rows, placement, fill_with_krylov_space(space, krylov, previous))


def store_previous(
    rows: StoredBasis, krylov: int, previous_steps: list[Tensor], placement: Placement
) -> None:
    """Store previous steps [n] in the rows from `krylov` on, and empty the list to free them."""
    for k in range(krylov, krylov + len(previous_steps)):
        rows.put(k, placement.own(previous_steps.pop(0)))


def cut(rows: StoredBasis, placement: Placement, found: Tensor) -> Subspace:
    """Remove the rows that vanished, in place, and return the subspace of the others.

    Args:
        rows: V, with zeros in rows that vanished.
        placement: which part of each vector this rank stores.
        found: what `fill_with_krylov_space` returned for the rows.
    """
    on_host = found_on_host(found)
    for slot, row in enumerate(on_host.kept):
        if slot != row:
            rows.move(row, slot)
    rows.cut(len(on_host.kept))
    return Subspace(rows, placement, on_host)
