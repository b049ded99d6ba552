"""Algorithm 2 of the paper: vectors that span { (D⁻¹H)ᵏ D⁻¹g, 0 ≤ k < K } and previous steps.

They are made orthonormal in the inner product of D, VᵀDV = 1, where the paper has VᵀV = 1: the same
subspace. There D⁻¹H is symmetric, so that of a new vector the last two rows have nearly
everything that the rows have (Lanczos). That goes first, and one look at all the rows is enough
for the rest, where Gram and Schmidt take two, and H̄ = VᵀHV a third. What the paper does with
orthonormal vectors is done with the help of VᵀV (`coordinates.Coordinates`).
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, Placement, StoredBasis
from krylov_descent.algorithms.metric import Diagonal, Metric
from krylov_descent.algorithms.metric_times_basis import Images
from krylov_descent.runtime.ops import operations

Product = Callable[[Tensor], Tensor]

# Of a new direction, what is left after orthogonalisation counts as nothing below this many
# units of rounding: it would be a random vector.
BREAKDOWN_UNITS = 100.0


def fill_with_krylov_space(
    rows: StoredBasis,
    product: Product,
    metric: Metric,
    gradient: Tensor,
    previous_steps: list[Tensor],
    placement: Placement,
) -> Tensor:
    """Algorithm 2, safe against breakdown, with any number of previous steps.

    Args:
        rows: for V; K of the Krylov space, and m of the previous steps.
        product: v [n] → this rank's part of Hv [n], which add up over ranks: a new vector, which
            is overwritten.
        metric: D on the part of a vector that the placement keeps.
        gradient: g [n], finite and not zero, the same on all ranks.
        previous_steps: m vectors [n], which join as the last directions in this order; none on the
            first step. Emptied, so that nothing but the rows holds them.
        placement: which part of each vector this rank keeps.

    Returns:
        What `found_on_host` reads: H̄, VᵀV, and the squared lengths of the directions before they
        were made 1, zero for one that vanished, whose row is zero.

    With a good preconditioner D⁻¹H is near the identity and a new direction may vanish. Then the
    Krylov part ends; a previous step still joins unless it lies in the span already. On a
    GPU that takes no decision on the host: a vanished direction becomes zero, as does all that
    follows from it.

    Cost: r products, D⁻¹ each. For a vector that follows k others these are read twice, 2kn
    multiply-adds, and for VᵀV all at the end, r²n. For each product, what the placement sends.
    For a previous step two products with D in place of D⁻¹. Where these are dear, D times the rows
    is kept, too (`Images`), and read once; elsewhere there is one for every vector.
    """
    krylov = rows.count - len(previous_steps)
    curvature = gradient.new_zeros(rows.count, rows.count)
    lengths = gradient.new_zeros(rows.count)
    images = Images(rows, metric)
    # What is stored less exactly cannot tell a smaller remainder from its own rounding.
    least = max(BREAKDOWN_UNITS * torch.finfo(gradient.dtype).eps, rows.epsilon) ** 2
    for slot in range(krylov, rows.count):
        rows.put(slot, placement.own(previous_steps.pop(0)))  # where they wait

    def curved(k: int) -> Tensor:
        """Hv_k."""
        return placement.total(product(placement.whole(rows.get(k))))

    def times(which: slice, w: Tensor) -> Tensor:
        return placement.dots(rows.times(which, w))

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return placement.settled(placement.dots(a @ b))

    def scale_of(k: int, squared: Tensor, before: Tensor) -> Tensor:
        """What makes 1 of the length of what is left of a vector, given both lengths' squares."""
        return operations().scale_of_length(squared, least, before, lengths[k : k + 1])

    def add(k: int, u: Tensor, w: Tensor, taken: Tensor, scale: Tensor) -> bool:
        """Make row k of what is left of u, times a scale; False if it is seen to be 0.

        Multiples of rows were taken from u, and w is Du with them.
        """
        rows.put(k, u, scale)
        images.keep(k, w, taken, scale)
        # To read a number takes a GPU a stop, and a CPU nothing. NaN goes on, and is found in H̄.
        unread = u.is_cuda or not operations().may_read
        return unread or float(lengths[k]) != 0

    def add_next(k: int) -> bool:
        """Row k of D⁻¹Hv, v the row before; on the way that one's row of H̄."""
        w = curved(k - 1)
        known, near = slice(0, k), slice(max(0, k - 2), k)
        projected = curvature[k - 1, known]
        if rows.rounded:
            projected.copy_(times(known, w))
        along = times(near, w)
        images.subtract(w, near, along)
        found = times(known, w)
        if type(placement) is Alone:  # else ranks have to agree in between
            place = lengths[k : k + 1]
            both = _remainder_at_once(rows, metric, w, found, along, least, projected, place)
            if both is not None:
                u, scale = both
                return add(k, u, w, found, scale)
        u = rows.subtracted(metric.solve(w), known, found)
        if not rows.rounded:  # VᵀDV = 1, and so this is Vᵀ(Hv), too
            projected.copy_(found)
            projected[near] += along
        # uᵀw is uᵀDu, since u is orthogonal to the rows. All ranks must come to the same decision.
        parts = torch.stack([placement.dots(u @ w), projected @ projected])
        squared, removed = placement.settled(parts).unbind()
        return add(k, u, w, found, scale_of(k, squared, squared + removed))

    def add_previous(k: int) -> bool:
        """Row k of the previous step that waits there, orthogonalised twice."""
        u, known = rows.get(k).clone(), slice(0, k)
        w = metric.multiply(u)
        before = dot(u, w)
        u = rows.subtracted(u, known, times(known, w))
        del w
        # Of u itself: w less what was taken would have rounding of its own, which u has not.
        w = metric.multiply(u)
        taken = times(known, w)
        u = rows.subtracted(u, known, taken)
        return add(k, u, w, taken, scale_of(k, dot(u, w), before))

    def measure(k: int) -> None:
        """The row of H̄ of a direction that no other follows from."""
        curvature[k, : k + 1] = times(slice(0, k + 1), curved(k))

    own = placement.own(gradient)
    first = metric.solve(own)
    squared = dot(first, own)
    alive = add(0, first, own, own[:0], scale_of(0, squared, squared))
    del own, first
    for k in range(1, krylov):
        alive = alive and add_next(k)
    if alive:
        measure(krylov - 1)
    for slot in range(krylov, rows.count):
        if add_previous(slot):
            measure(slot)
    small = placement.settled(torch.stack([curvature, placement.dots(rows.gram())]))
    return torch.cat([*small, lengths.unsqueeze(0)])


def _remainder_at_once(
    rows: StoredBasis,
    metric: Metric,
    w: Tensor,
    found: Tensor,
    along: Tensor,
    least: float,
    projected: Tensor,
    place: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """What is left of D⁻¹w, and its scale, at once; None where single operations are for it.

    Args:
        rows: V.
        metric: D.
        w: from which D times the last rows was taken already; overwritten where D is diagonal.
        found: Vᵀw for the first rows, which are to be taken from D⁻¹w.
        along: what was taken of the last of these before.
        least: as in `scale_of_length`, where the other is everything, with what was taken.
        projected: where all that was taken is to be written.
        place: as in `scale_of_length`.
    """
    if not (rows.plain and operations().fuses):
        return None
    diagonal = metric.diagonal if isinstance(metric, Diagonal) else None
    u = w if diagonal is not None else metric.solve(w)
    parts = operations().subtract_rows(u, diagonal, rows.stored[: len(found)], found, w)
    if parts is None:
        return None
    return u, operations().scale_of_remainder(parts, found, along, least, projected, place)


def found_on_host(found: Tensor) -> tuple[list[int], Tensor, Tensor]:
    """The rows that did not vanish, and H̄ and VᵀV between these alone, symmetric, on the CPU.

    H̄ is in float64, and VᵀV in the precision of vectors.

    Args:
        found: by `fill_with_krylov_space`, [2(K + m) + 1, K + m], of H̄ and VᵀV the lower triangles.
            Read in one piece: each is a wait for a GPU.
    """
    # By NumPy: torch's tril and indices wake all threads of the CPU (see `threads`).
    numbers = found.cpu().numpy()
    count = numbers.shape[1]
    both = numbers[:-1].reshape(2, count, count)
    rows = numbers[-1].nonzero()[0]
    if len(rows) < count:
        both = both[:, rows[:, np.newaxis], rows]
    curvature, gram = np.where(_lower_triangle(len(rows)), both, both.transpose(0, 2, 1))
    return rows.tolist(), torch.from_numpy(curvature.astype(np.float64)), torch.from_numpy(gram)


@cache
def _lower_triangle(rows: int) -> NDArray[np.bool_]:
    return np.tri(rows, dtype=bool)
