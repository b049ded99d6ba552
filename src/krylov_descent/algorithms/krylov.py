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
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Placement, StoredBasis
from krylov_descent.algorithms.metric import Metric
from krylov_descent.algorithms.metric_times_basis import MetricTimesBasis
from krylov_descent.runtime.ops import operations

Product = Callable[[Tensor], Tensor]

# A direction counts as zero if orthogonalisation leaves less than this many units of rounding of
# it: the remainder would be a random vector.
BREAKDOWN_UNITS = 100.0


class KrylovSpace:
    """V in the making: each method adds a row, or computes a row of H̄.

    Args:
        rows: storage of V.
        product: v [n] → this rank's summand of Hv [n], a new vector that may be overwritten.
        metric: D on the part of a vector that the placement stores.
        gradient: g [n], finite and not zero, the same on all ranks.
        placement: which part of each vector this rank stores.

    Memory: `MetricTimesBasis` may take as much as the rows.
    """

    def __init__(
        self,
        rows: StoredBasis,
        product: Product,
        metric: Metric,
        gradient: Tensor,
        placement: Placement,
    ) -> None:
        self._rows, self._product, self._metric = rows, product, metric
        self._gradient, self._placement = gradient, placement
        self._curvature = gradient.new_empty(rows.count, rows.count)
        self._lengths = gradient.new_empty(rows.count)
        self._images = MetricTimesBasis(rows, metric)
        # Rounded rows cannot tell a smaller remainder from their own rounding.
        self._least = max(BREAKDOWN_UNITS * torch.finfo(gradient.dtype).eps, rows.epsilon) ** 2

    def begin(self) -> bool:
        """Make row 0 from D⁻¹g; False if it vanished, which the host does not see on a GPU."""
        self._curvature.zero_()
        self._lengths.zero_()  # of rows that are not made
        own = self._placement.own(self._gradient)
        first = self._metric.solve(own)
        squared = self._dot(first, own)
        return self._add(0, first, own, own[:0], squared, squared)

    def add_next(self, k: int) -> bool:
        """Make row k from D⁻¹Hv, with v the row before it, and compute row k - 1 of H̄.

        Returns:
            False if row k vanished, which the host does not see on a GPU.
        """
        rows, placement = self._rows, self._placement
        w = self._curved(k - 1)
        known, near = slice(0, k), slice(max(0, k - 2), k)
        projected = self._curvature[k - 1, known]
        if rows.rounded:
            projected.copy_(self._times(known, w))
        along = self._times(near, w)
        self._images.subtract(w, near, along)
        found = self._times(known, w)
        u = rows.subtracted(self._metric.solve(w), known, found)
        if not rows.rounded:  # because VᵀDV = 1, `found` plus `along` is Vᵀ(Hv)
            projected.copy_(found)
            projected[near] += along
        # uᵀw is uᵀDu, since u is orthogonal to the rows. All ranks must reach the same decision.
        parts = torch.stack([placement.dots(u @ w), projected @ projected])
        squared, removed = placement.settled(parts).unbind()
        return self._add(k, u, w, found, squared, squared + removed)

    def add_previous(self, k: int) -> bool:
        """Make row k from the previous step stored there, orthogonalised twice.

        Returns:
            False if row k vanished, which the host does not see on a GPU.
        """
        rows, metric = self._rows, self._metric
        u, known = rows.get(k).clone(), slice(0, k)
        w = metric.multiply(u)
        before = self._dot(u, w)
        u = rows.subtracted(u, known, self._times(known, w))
        del w
        # Computed from u anew: an updated w would have rounding errors that u does not have.
        w = metric.multiply(u)
        taken = self._times(known, w)
        u = rows.subtracted(u, known, taken)
        return self._add(k, u, w, taken, self._dot(u, w), before)

    def measure(self, k: int) -> None:
        """Compute row k of H̄, for a direction from which no other is made."""
        known = slice(0, k + 1)
        self._curvature[k, known] = self._times(known, self._curved(k))

    def numbers(self) -> Tensor:
        """H̄, VᵀV and the squared lengths of the directions, as `found_on_host` takes them."""
        placement, gram = self._placement, self._rows.gram()
        small = placement.settled(torch.stack([self._curvature, placement.dots(gram)]))
        return torch.cat([*small, self._lengths.unsqueeze(0)])

    def _curved(self, k: int) -> Tensor:
        """This rank's part of Hv_k."""
        return self._placement.total(self._product(self._placement.whole(self._rows.get(k))))

    def _times(self, which: slice, w: Tensor) -> Tensor:
        return self._placement.dots(self._rows.times(which, w))

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return self._placement.settled(self._placement.dots(a @ b))

    def _add(
        self, k: int, u: Tensor, w: Tensor, taken: Tensor, squared: Tensor, before: Tensor
    ) -> bool:
        """Store u / ‖u‖_D as row k, or zero on breakdown; False if the host sees that it is zero.

        Args:
            k: the row.
            u: the new direction.
            w: Du from before the multiples `taken` of the rows were subtracted from u.
            taken: see w.
            squared: ‖u‖_D².
            before: ‖u‖_D² before orthogonalisation.
        """
        vanished = squared <= self._least * before  # false for NaN, which shows up in H̄
        self._lengths[k] = torch.where(vanished, 0.0, squared)
        scale = torch.where(vanished, 0.0, squared.rsqrt())
        self._rows.put(k, u, scale)
        self._images.keep(k, w, taken, scale)
        # Reading a number makes the host wait for a GPU, and costs nothing on a CPU.
        unread = u.is_cuda or not operations().may_read
        return unread or float(self._lengths[k]) != 0


class Directions(Protocol):
    """The methods of `KrylovSpace`, which an engine may replay."""

    def begin(self) -> bool:
        """See `KrylovSpace`."""

    def add_next(self, k: int, /) -> bool:
        """See `KrylovSpace`."""

    def add_previous(self, k: int, /) -> bool:
        """See `KrylovSpace`."""

    def measure(self, k: int, /) -> None:
        """See `KrylovSpace`."""

    def numbers(self) -> Tensor:
        """See `KrylovSpace`."""


def fill_with_krylov_space(space: Directions, krylov: int, previous: int) -> Tensor:
    """Fill V by Algorithm 2, safe against breakdown, with any number of previous steps.

    Args:
        space: V, with the previous steps in the rows behind the Krylov space.
        krylov: K, the rows of the Krylov space.
        previous: m, the rows of previous steps, which join in this order.

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
    alive = space.begin()
    for k in range(1, krylov):
        alive = alive and space.add_next(k)
    if alive:
        space.measure(krylov - 1)
    for k in range(krylov, krylov + previous):
        if space.add_previous(k):
            space.measure(k)
    return space.numbers()


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
