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
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Placement
from krylov_descent.algorithms.growing_basis import GrowingBasis
from krylov_descent.algorithms.metric import Metric
from krylov_descent.algorithms.metric_times_basis import MetricTimesBasis
from krylov_descent.runtime.ops import operations

Product = Callable[[Tensor], Tensor]

# A direction counts as zero if orthogonalisation leaves less than this many units of rounding of
# it: the remainder would be a random vector.
BREAKDOWN_UNITS = 100.0


class KrylovSpace:
    """V in the making: each method appends a row, or computes a row of H̄.

    Args:
        basis: V.
        product: v [n] → this rank's summand of Hv [n], a new vector that may be overwritten.
        metric: D on the part of a vector that the placement stores.
        gradient: g [n], finite and not zero, the same on all ranks.
        placement: which part of each vector this rank stores.

    Memory: `MetricTimesBasis` may take as much as the rows.
    """

    def __init__(
        self,
        basis: GrowingBasis,
        product: Product,
        metric: Metric,
        gradient: Tensor,
        placement: Placement,
    ) -> None:
        self._basis, self._product, self._metric = basis, product, metric
        self._gradient, self._placement = gradient, placement
        rows = basis.rows
        self._curvature = gradient.new_empty(rows.count, rows.count)
        self._lengths = gradient.new_empty(rows.count, 1)
        self._images = MetricTimesBasis(basis, metric)
        # Rounded rows cannot tell a smaller remainder from their own rounding.
        self._least = max(BREAKDOWN_UNITS * torch.finfo(gradient.dtype).eps, rows.epsilon) ** 2

    def begin(self) -> bool:
        """Make the first row from D⁻¹g; False if it vanished, which is not seen on a GPU."""
        self._basis.begin_at(0)  # previous steps may be stored already
        self._images.begin()
        self._curvature.zero_()
        self._lengths.zero_()
        own = self._placement.own(self._gradient)
        first = self._metric.solve(own)
        squared = self._dot(first, own)
        return self._append(first, own, None, squared, squared)

    def begin_at(self, row: int) -> None:
        """Append from this row on; the rows before it are made, or zero."""
        self._basis.begin_at(row)
        self._images.begin_at(row)

    def add_next(self) -> bool:
        """Make a row from D⁻¹Hv, with v the newest row, and compute v's row of H̄.

        Returns:
            False if the row vanished, which is not seen on a GPU.
        """
        basis, placement = self._basis, self._placement
        w = self._curved()
        seen = placement.dots(basis.times(w)) if basis.rows.rounded else None
        along = placement.dots(basis.times_last(w))
        self._images.subtract_last(w, along)
        found = placement.dots(basis.times(w))
        u = basis.subtracted(self._metric.solve(w), found)
        # Because VᵀDV = 1, `found` plus `along` is Vᵀ(Hv), unless rows are rounded.
        projected = basis.add_to_last(found, along) if seen is None else seen
        basis.note(self._curvature, projected)
        # uᵀw is uᵀDu, since u is orthogonal to the rows. All ranks must reach the same decision.
        parts = torch.stack([placement.dots(u @ w), projected @ projected])
        squared, removed = placement.settled(parts).unbind()
        return self._append(u, w, found, squared, squared + removed)

    def add_previous(self) -> bool:
        """Orthogonalise the previous step that is stored in the next row, twice, and store it.

        Returns:
            False if the row vanished, which is not seen on a GPU.
        """
        basis, metric = self._basis, self._metric
        u = basis.waiting()
        w = metric.multiply(u)
        before = self._dot(u, w)
        u = basis.subtracted(u, self._placement.dots(basis.times(w)))
        del w
        # Computed from u anew: an updated w would have rounding errors that u does not have.
        w = metric.multiply(u)
        taken = self._placement.dots(basis.times(w))
        u = basis.subtracted(u, taken)
        return self._append(u, w, taken, self._dot(u, w), before)

    def measure(self) -> None:
        """Compute the newest row's row of H̄; for a direction from which no other is made."""
        projected = self._placement.dots(self._basis.times(self._curved()))
        self._basis.note(self._curvature, projected)

    def numbers(self) -> Tensor:
        """H̄, VᵀV and the squared lengths of the directions, as `found_on_host` takes them."""
        placement, gram = self._placement, self._basis.gram()
        small = placement.settled(torch.stack([self._curvature, placement.dots(gram)]))
        return torch.cat([*small, self._lengths.t()])

    def _curved(self) -> Tensor:
        """This rank's part of Hv, with v the newest row."""
        v = self._placement.whole(self._basis.newest())
        return self._placement.total(self._product(v))

    def _dot(self, a: Tensor, b: Tensor) -> Tensor:
        return self._placement.settled(self._placement.dots(a @ b))

    def _append(
        self, u: Tensor, w: Tensor, taken: Tensor | None, squared: Tensor, before: Tensor
    ) -> bool:
        """Append u / ‖u‖_D, or zero on breakdown; False if the host sees that it is zero.

        Args:
            u: the new direction.
            w: Du from before the multiples `taken` of the rows were subtracted from u.
            taken: see w; None for the first row.
            squared: ‖u‖_D².
            before: ‖u‖_D² before orthogonalisation.
        """
        vanished = squared <= self._least * before  # false for NaN, which shows up in H̄
        scale = torch.where(vanished, 0.0, squared.rsqrt())
        length = torch.where(vanished, 0.0, squared)
        self._basis.append(u, scale)
        self._images.append(w, taken, scale)
        self._basis.note(self._lengths, length.unsqueeze(0))
        # Reading a number makes the host wait for a GPU, and costs nothing on a CPU.
        unread = u.is_cuda or not operations().may_read
        return unread or float(length) != 0


class Directions(Protocol):
    """The methods of `KrylovSpace`, which an engine may replay."""

    def begin(self) -> bool:
        """See `KrylovSpace`."""

    def begin_at(self, row: int, /) -> None:
        """See `KrylovSpace`."""

    def add_next(self) -> bool:
        """See `KrylovSpace`."""

    def add_previous(self) -> bool:
        """See `KrylovSpace`."""

    def measure(self) -> None:
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
    for _ in range(1, krylov):
        alive = alive and space.add_next()
    if alive:
        space.measure()
    space.begin_at(krylov)  # after a breakdown there are rows that were not made
    for _ in range(previous):
        if space.add_previous():
            space.measure()
    return space.numbers()


class Found(NamedTuple):
    """What is known of a basis on the host. H̄ and VᵀV are symmetric."""

    kept: list[int]  # the r rows that did not vanish
    curvature: Tensor  # H̄ between these rows [r, r], float64
    gram: Tensor  # VᵀV between these rows [r, r], in the precision of the vectors
    squared_gradient: float  # gᵀD⁻¹g


def found_on_host(found: Tensor) -> Found:
    """Copy what was found to the host.

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
    projected = torch.from_numpy(curvature.astype(np.float64))
    return Found(rows.tolist(), projected, torch.from_numpy(gram), float(numbers[-1, 0]))


@cache
def _lower_triangle(rows: int) -> NDArray[np.bool_]:
    return np.tri(rows, dtype=bool)
