"""D times the rows of a basis, which orthogonalisation in the inner product of D needs."""

from torch import Tensor

from krylov_descent.algorithms.growing_basis import GrowingBasis
from krylov_descent.algorithms.metric import Diagonal, Entrywise, Metric


class MetricTimesBasis:
    """Products with DV, from a cache of DV where that is faster than to multiply with D again.

    DV is cached if D does not act entry by entry. It is not cached for a basis in fewer digits or
    on another device, where memory is short.

    Args:
        basis: V.
        metric: D.

    Memory: as much as the rows, if DV is cached.
    """

    def __init__(self, basis: GrowingBasis, metric: Metric) -> None:
        self._basis, self._metric = basis, metric
        expensive = basis.rows.plain and not isinstance(metric, Entrywise)
        self._kept = basis.empty_alike() if expensive else None

    def begin(self) -> None:
        """Forget all rows."""
        if self._kept is not None:
            self._kept.begin()

    def begin_at(self, row: int) -> None:
        """Append from this row on; the rows before it are used."""
        if self._kept is not None:
            self._kept.begin_at(row)

    def subtract_last(self, w: Tensor, coefficients: Tensor) -> None:
        """Subtract D times a combination of the last rows from a vector, in place."""
        if self._kept is not None and w.is_cuda:  # in one kernel
            self._kept.subtracted_last(w, coefficients)
            return
        if self._kept is not None:
            w.sub_(self._kept.combine_last(coefficients))
            return
        combined = self._basis.combine_last(coefficients)
        if isinstance(self._metric, Diagonal) and w.is_cuda:  # in one kernel
            w.addcmul_(combined, self._metric.diagonal, value=-1)
        else:
            w.sub_(self._metric.multiply(combined))

    def append(self, w: Tensor, taken: Tensor | None, scale: Tensor) -> None:
        """Cache D times the next row, which is u times a scale.

        Args:
            w: Du [n] from before multiples of all rows were subtracted from u; overwritten if there
                are any.
            taken: these multiples; None for the first row.
            scale: a tensor of one number.
        """
        if self._kept is None:
            return
        self._kept.append(w if taken is None else self._kept.subtracted(w, taken), scale)
