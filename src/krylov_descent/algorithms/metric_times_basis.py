"""D times the rows of a basis, which orthogonalisation in the inner product of D needs."""

from torch import Tensor

from krylov_descent.algorithms.basis_storage import Storage, StoredBasis
from krylov_descent.algorithms.metric import Diagonal, Entrywise, Metric


class MetricTimesBasis:
    """Products with DV, from a cache of DV where that is faster than to multiply with D again.

    DV is cached if D does not act entry by entry. It is not cached for a basis in fewer digits or
    on another device, where memory is short.

    Args:
        rows: V.
        metric: D.

    Memory: as much as the rows, if DV is cached.
    """

    def __init__(self, rows: StoredBasis, metric: Metric) -> None:
        self._rows, self._metric = rows, metric
        self._kept: StoredBasis | None = None
        if rows.plain and not isinstance(metric, Entrywise):
            slots, size = rows.stored.shape
            self._kept = StoredBasis(slots, size, rows.stored, Storage())

    def subtract(self, w: Tensor, which: slice, coefficients: Tensor) -> None:
        """Subtract D times a combination of some rows from a vector, in place."""
        if self._kept is not None and w.is_cuda:  # in one kernel
            self._kept.subtracted(w, which, coefficients)
            return
        if self._kept is not None:
            w.sub_(self._kept.combine(which, coefficients))
            return
        combined = self._rows.combine(which, coefficients)
        if isinstance(self._metric, Diagonal) and w.is_cuda:  # in one kernel
            w.addcmul_(combined, self._metric.diagonal, value=-1)
        else:
            w.sub_(self._metric.multiply(combined))

    def keep(self, k: int, w: Tensor, taken: Tensor, scale: Tensor) -> None:
        """Cache D times row k, which is u times a scale.

        Args:
            k: the row.
            w: Du [n] from before multiples of the first rows were subtracted from u; may be
                overwritten.
            taken: these multiples; none for the first row, whose w is not overwritten.
            scale: a tensor of one number.
        """
        if self._kept is None:
            return
        if len(taken):
            w = self._kept.subtracted(w, slice(0, len(taken)), taken)
        self._kept.put(k, w, scale)
