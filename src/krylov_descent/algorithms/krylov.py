"""Algorithm 2 of the paper: vectors that span { (D⁻¹H)ᵏ D⁻¹g, 0 ≤ k < K } and previous steps.

The vectors are orthonormal in the inner product of D, VᵀDV = 1. The paper has VᵀV = 1, with the
same span. In the inner product of D the matrix D⁻¹H is symmetric, so nearly all that a new vector
has in common with the rows lies along the last two rows (Lanczos). These two components are removed
first. One pass over all rows then removes the rest and gives H̄ = VᵀHV. Gram-Schmidt would take two
passes, and H̄ a third. The paper's computations with orthonormal vectors use VᵀV here
(`coordinates.Coordinates`).
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, Placement, StoredBasis
from krylov_descent.algorithms.metric import Diagonal, Metric
from krylov_descent.algorithms.metric_times_basis import MetricTimesBasis
from krylov_descent.runtime.ops import operations

Product = Callable[[Tensor], Tensor]

# A direction counts as zero if orthogonalisation leaves less than this many units of rounding of
# it: the remainder would be a random vector.
BREAKDOWN_UNITS = 100.0


def fill_with_krylov_space(
    rows: StoredBasis,
    product: Product,
    metric: Metric,
    gradient: Tensor,
    previous_steps: list[Tensor],
    placement: Placement,
) -> Tensor:
    """Fill V by Algorithm 2, safe against breakdown, with any number of previous steps.

    Args:
        rows: storage of V, with K rows for the Krylov space and m rows for the previous steps.
        product: v [n] → this rank's summand of Hv [n], a new vector that may be overwritten.
        metric: D on the part of a vector that the placement stores.
        gradient: g [n], finite and not zero, the same on all ranks.
        previous_steps: m vectors [n], which join as the last directions in this order; none on the
            first step. The list is emptied, so that only the rows hold them.
        placement: which part of each vector this rank stores.

    Returns:
        A tensor for `found_on_host`: H̄, VᵀV, and the squared lengths of the directions before
        normalisation. A direction that vanished has length zero and a zero row.

    With a good preconditioner D⁻¹H is near the identity and a new direction may vanish. Then the
    Krylov part ends. A previous step still joins unless it lies in the span already. On a GPU the
    host decides nothing: a vanished direction becomes zero, and so does everything computed from
    it.

    Cost, for r rows: r products with H, each followed by D⁻¹. A vector that follows k others reads
    these twice, with 2kn multiply-adds. VᵀV reads all rows once, with r²n multiply-adds. Each
    product has the communication of the placement. A previous step takes two products with D in
    place of D⁻¹. Where products with D are expensive, D times the rows is stored and read once
    (`MetricTimesBasis`). Otherwise every vector takes one more product with D.
    """
    krylov = rows.count - len(previous_steps)
    curvature = gradient.new_zeros(rows.count, rows.count)
    lengths = gradient.new_zeros(rows.count)
    images = MetricTimesBasis(rows, metric)
    # Rounded rows cannot tell a smaller remainder from their own rounding.
    least = max(BREAKDOWN_UNITS * torch.finfo(gradient.dtype).eps, rows.epsilon) ** 2
    for slot in range(krylov, rows.count):
        rows.put(slot, placement.own(previous_steps.pop(0)))  # waits for `add_previous`

    def curved(k: int) -> Tensor:
        """This rank's part of Hv_k."""
        return placement.total(product(placement.whole(rows.get(k))))

    def times(which: slice, w: Tensor) -> Tensor:
        return placement.dots(rows.times(which, w))

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return placement.settled(placement.dots(a @ b))

    def scale_of(k: int, squared: Tensor, before: Tensor) -> Tensor:
        """1/‖u‖_D, or 0 on breakdown, from ‖u‖_D² now and `before` orthogonalisation."""
        return operations().scale_of_length(squared, least, before, lengths[k : k + 1])

    def add(k: int, u: Tensor, w: Tensor, taken: Tensor, scale: Tensor) -> bool:
        """Store u times a scale as row k; False if the host sees that the row is zero.

        w is Du from before the multiples `taken` of the rows were subtracted from u.
        """
        rows.put(k, u, scale)
        images.keep(k, w, taken, scale)
        # Reading a number makes the host wait for a GPU, and costs nothing on a CPU. NaN goes on,
        # and shows up in H̄.
        unread = u.is_cuda or not operations().may_read
        return unread or float(lengths[k]) != 0

    def add_next(k: int) -> bool:
        """Make row k from D⁻¹Hv, with v the row before it, and write row k - 1 of H̄."""
        w = curved(k - 1)
        known, near = slice(0, k), slice(max(0, k - 2), k)
        projected = curvature[k - 1, known]
        if rows.rounded:
            projected.copy_(times(known, w))
        along = times(near, w)
        images.subtract(w, near, along)
        found = times(known, w)
        if type(placement) is Alone:  # otherwise ranks must agree in between
            place = lengths[k : k + 1]
            both = _remainder_at_once(rows, metric, w, found, along, least, projected, place)
            if both is not None:
                u, scale = both
                return add(k, u, w, found, scale)
        u = rows.subtracted(metric.solve(w), known, found)
        if not rows.rounded:  # because VᵀDV = 1, `found` plus `along` is Vᵀ(Hv)
            projected.copy_(found)
            projected[near] += along
        # uᵀw is uᵀDu, since u is orthogonal to the rows. All ranks must reach the same decision.
        parts = torch.stack([placement.dots(u @ w), projected @ projected])
        squared, removed = placement.settled(parts).unbind()
        return add(k, u, w, found, scale_of(k, squared, squared + removed))

    def add_previous(k: int) -> bool:
        """Make row k from the previous step stored there, orthogonalised twice."""
        u, known = rows.get(k).clone(), slice(0, k)
        w = metric.multiply(u)
        before = dot(u, w)
        u = rows.subtracted(u, known, times(known, w))
        del w
        # Computed from u anew: an updated w would have rounding errors that u does not have.
        w = metric.multiply(u)
        taken = times(known, w)
        u = rows.subtracted(u, known, taken)
        return add(k, u, w, taken, scale_of(k, dot(u, w), before))

    def measure(k: int) -> None:
        """Compute row k of H̄, for a direction from which no other is made."""
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
    """The remainder of D⁻¹w and its scale by fused operations; None if these are not available.

    Args:
        rows: V.
        metric: D.
        w: Hv minus D times its components along the last rows; overwritten if D is diagonal.
        found: Vᵀw for the first rows, which are subtracted from D⁻¹w.
        along: the components along the last rows that were subtracted before.
        least: the threshold of `scale_of_length`, relative to the squared length with all
            components.
        projected: receives all components: `found`, with `along` added to the last ones.
        place: receives the squared length of the remainder, as in `scale_of_length`.
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
    """The rows that did not vanish, and H̄ and VᵀV between these rows, symmetric, on the CPU.

    H̄ is in float64, and VᵀV in the precision of the vectors.

    Args:
        found: by `fill_with_krylov_space`, [2(K + m) + 1, K + m]. Of H̄ and VᵀV only the lower
            triangles are used. It is copied to the host at once, because each copy waits for the
            GPU.
    """
    # By NumPy: torch's tril and indexing start all CPU threads (see `threads`).
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
