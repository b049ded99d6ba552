"""Algorithm 2 for a basis that is kept elsewhere, or on several ranks (see `basis`).

The same mathematics as `subspace.krylov_basis`, written over stored rows: vectors come from the
basis one at a time, and inner products may be sums over ranks. What ends the Krylov part early,
a direction that vanishes, is decided by numbers that are the same on every rank.
"""

import torch
from torch import Tensor

from krylov_descent.basis import Placement, Storage, StoredBasis
from krylov_descent.subspace import BREAKDOWN_UNITS, Product, curvature_between


class StoredSubspace:
    """Orthonormal vectors and the curvature between them, as `subspace.Subspace` has them.

    Args:
        rows: V.
        placement: which part of each vector this rank keeps.
        curvature: H̄ [r, r], float64 on the CPU.
    """

    def __init__(self, rows: StoredBasis, placement: Placement, curvature: Tensor) -> None:
        self.rows, self.placement, self.curvature = rows, placement, curvature

    @property
    def rank(self) -> int:
        """How many independent directions there are."""
        return self.rows.count

    def combine(self, coefficients: Tensor) -> Tensor:
        """V c as a vector [n], for small c [r] (float64, CPU)."""
        here = coefficients.to(self.rows.device, self.rows.dtype)
        return self.placement.whole(self.rows.combine(here))

    def project(self, vector: Tensor) -> Tensor:
        """This rank's part of Vᵀ(the sum over ranks of vectors), [r] in float64 on the CPU.

        The parts of all ranks add up to the whole. May overwrite the vector.
        """
        part = self.placement.to_project(vector)
        return self.rows.times(self.rank, part).to("cpu", torch.float64)


def stored_krylov_basis(
    product: Product,
    solve: Product,
    gradient: Tensor,
    previous_steps: list[Tensor],
    dimension: int,
    *,
    placement: Placement,
    storage: Storage,
) -> StoredSubspace:
    """Algorithm 2, safe against breakdown, with any number of previous steps.

    Args:
        product: v [n] → this rank's part of Hv [n], which add up over ranks.
        solve: D⁻¹ on the part of a vector that the placement keeps.
        gradient: g [n], finite and not zero, the same on all ranks.
        previous_steps: m vectors [n], which join as the last directions in this order; none on the
            first step. Emptied, so that nothing but the basis holds them.
        dimension: K, the dimension of the Krylov part.
        placement: which part of each vector this rank keeps.
        storage: how it is kept.

    Cost: as `subspace.krylov_basis`, and for each product what the placement sends. Rows in
    bfloat16 are rounded after they were orthogonalised; products and H̄ are of the rounded rows,
    so that the subspace is what is stored, and orthogonal to about its rounding over √n.
    """
    krylov = min(dimension, gradient.numel())
    slots = krylov + len(previous_steps)
    rows = StoredBasis(slots, placement.size, gradient, storage)
    alive = torch.zeros(slots, dtype=torch.float64, device=gradient.device)
    curvature = gradient.new_zeros(slots, slots)
    for slot in range(krylov, slots):
        rows.put(slot, placement.own(previous_steps.pop(0)))  # where they wait

    def curved(k: int) -> Tensor:
        """The part of w = Hv_k; on the way the row wᵀV of H̄."""
        w = placement.total(product(placement.whole(rows.get(k))))
        curvature[k, : k + 1] = rows.times(k + 1, w)
        return w

    def add(k: int, u: Tensor) -> bool:
        """Make row k of what u adds to the rows before; False if that is seen to be nothing."""
        direction, norm = _new_direction(rows, k, u, placement)
        rows.put(k, direction)
        alive[k] = norm
        # Reading a number costs a GPU a stop, and a CPU nothing. NaN goes on, and is found in H̄.
        return gradient.is_cuda or float(alive[k]) != 0

    if add(0, solve(placement.own(gradient))):
        for k in range(1, krylov):
            if not add(k, solve(curved(k - 1))):
                break
        else:
            curved(krylov - 1)
    for slot in range(krylov, slots):
        if add(slot, rows.get(slot)):
            curved(slot)
    return _cut(rows, placement, alive, placement.settled(placement.dots(curvature)))


def _new_direction(
    rows: StoredBasis, k: int, u: Tensor, placement: Placement
) -> tuple[Tensor, Tensor]:
    """What u adds to the first k rows, normalised, and its norm before; zeros if it is nothing.

    Orthogonalised twice, as in `subspace`. Overwrites u.
    """
    before = _squared_norm(u)
    for _ in range(2 if k else 0):
        u.sub_(rows.combine(placement.dots(rows.times(k, u))))
    norms = torch.stack([before, _squared_norm(u)])
    before, after = placement.settled(placement.dots(norms)).sqrt().unbind()
    # What is stored less exactly cannot tell a smaller remainder from its own rounding.
    least = max(BREAKDOWN_UNITS * torch.finfo(u.dtype).eps, rows.epsilon)
    vanished = after <= (least if k else 0.0) * before
    direction = torch.where(vanished, 0.0, u.div_(after.to(u.dtype)))
    return direction, torch.where(vanished, 0.0, after)


def _squared_norm(u: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(u, dtype=torch.float64)
    return norm.square()


def _cut(
    rows: StoredBasis, placement: Placement, alive: Tensor, curvature: Tensor
) -> StoredSubspace:
    """Leave out the rows that vanished; the lower triangle of H̄ is the whole of it."""
    kept = (alive != 0).cpu().nonzero()[:, 0].tolist()
    for slot, row in enumerate(kept):
        if slot != row:
            rows.move(row, slot)
    rows.cut(len(kept))
    return StoredSubspace(rows, placement, curvature_between(kept, curvature))
