"""Operations on long vectors as they pass by: rows of a basis, and what is made of them.

Whether the kernels of `basis_vectors` are for them is decided here. What these look at is made
before (`pending`), and of what they change nothing is known afterwards (`knowledge`).
"""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import basis_vectors
from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.layouts import is_ours
from krylov_descent.cuda.triton.lazy_products import Pending
from krylov_descent.cuda.triton.matrix_cache import Knowledge

aten = torch.ops.aten
# A combination of a few rows, each of so many numbers at least, is one of a basis.
LEAST_COLUMNS = 1 << 16


class LongVectors:
    """What is done with them by kernels of ours, or by torch.

    Args:
        device: the GPU.
        known: what is known of matrices.
        pending: what is still to be made.
    """

    def __init__(self, device: torch.device, known: Knowledge, pending: Pending) -> None:
        self._device, self._known, self._pending = device, known, pending

    def is_gram(self, a: Tensor, b: Tensor) -> bool:
        """Whether a times b has the inner products between a few long rows, a."""
        return self._are_long_rows(a) and is_ours(b, self._device) and _is_transpose(b, a)

    def gram(self, rows: Tensor) -> Tensor | None:
        """These products [count, count]; None where there are too many numbers."""
        self._pending.settled(rows)
        return basis_vectors.gram(rows)

    def mv(self, a: Tensor, x: Tensor) -> Any:
        """a [m, n] times x [n], in place of torch's: a projection on rows, or a sum of them."""
        fits = is_ours(x, self._device) and x.shape == a.shape[1:] and x.is_contiguous()
        self._pending.all_settled(a, x)
        if fits and self._are_long_rows(a):
            return basis_vectors.project(a, x)
        if self._is_combination(a, x):
            return basis_vectors.combine(a.t(), x)
        return aten.mv.default(a, x)

    def addmv(self, y: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Any:
        """y [m] plus a [m, n] times x [n]; all of them are made."""
        if not factors and self._may_join(y, a, x):
            return basis_vectors.combine(a.t(), x, y)
        return aten.addmv.default(y, a, x, **factors)

    def addmv_(self, y: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Any:
        """The same in place of y."""
        sign = factors.get("alpha", 1)
        if set(factors) <= {"alpha"} and sign in (1, -1) and self._may_join(y, a, x):
            return basis_vectors.add_combination(a.t(), x, y, int(sign), y)
        return aten.addmv_.default(y, a, x, **factors)

    def scale_of_length(
        self, squared: Tensor, least: float, before: Tensor, place: Tensor
    ) -> Tensor | None:
        """What makes a vector's length 1, given its square, as in `krylov`; or None."""
        if not all(is_ours(x, self._device) for x in (squared, before, place)):
            return None
        self._pending.all_settled(squared, before)
        return basis_vectors.scale_of_length(squared, least, before, place)

    def subtract_combination(
        self, w: Tensor, rows: Tensor, coefficients: Tensor, weights: Tensor
    ) -> bool:
        """W - weights ∘ Σ coefficients[k] rows[k] in place of w [n]; False where it is not ours."""
        if not (self._may_join(w, rows.t(), coefficients) and self._are_like(w, weights)):
            return False
        self._pending.settle_readers_of([w])
        self._pending.all_settled(w, rows, coefficients, weights)
        basis_vectors.add_combination(rows, coefficients, w, -1, w, weights)
        self._known.forget(w)
        return True

    def subtract_rows(
        self, start: Tensor, divisor: Tensor | None, rows: Tensor, taken: Tensor, w: Tensor
    ) -> Tensor | None:
        """Start / divisor - Σ taken[k] rows[k] in place of the start [n], which may be w.

        Parts of its product with w, for `scale_of_remainder`; None where it is not ours.
        """
        others = [w] if divisor is None else [w, divisor]
        if not (self._may_join(start, rows.t(), taken) and self._are_like(start, *others)):
            return None
        self._pending.settle_readers_of([start])
        self._pending.all_settled(start, rows, taken, *others)
        parts = basis_vectors.subtract_rows(start, divisor, rows, taken, w)
        self._known.forget(start)
        return parts

    def scale_of_remainder(
        self,
        parts: Tensor,
        taken: Tensor,
        along: Tensor,
        least: float,
        projected: Tensor,
        place: Tensor,
    ) -> Tensor:
        """What makes the length of a remainder 1, and beside it what was taken, as in `krylov`."""
        self._pending.settle_readers_of([projected, place])
        self._pending.all_settled(parts, taken, along)
        scale = basis_vectors.scale_of_remainder(parts, taken, along, least, projected, place)
        self._known.forget(projected)
        self._known.forget(place)
        return scale

    def _are_long_rows(self, rows: Tensor) -> bool:
        """Whether it is a few rows of a basis."""
        if not is_ours(rows, self._device) or rows.dim() != 2 or rows.stride(1) != 1:
            return False
        count, size = rows.shape
        return count <= basis_vectors.MOST_ROWS and LEAST_COLUMNS <= size <= halves.LARGEST

    def _is_combination(self, a: Tensor, x: Tensor) -> bool:
        """Whether a [n, count] times x is a sum of a few long rows."""
        fits = is_ours(x, self._device) and x.shape == a.shape[1:] and x.is_contiguous()
        return fits and a.dim() == 2 and self._are_long_rows(a.t())

    def _may_join(self, y: Tensor, a: Tensor, x: Tensor) -> bool:
        """Whether y is a vector like that sum."""
        fits = is_ours(y, self._device) and y.shape == a.shape[:1] and y.is_contiguous()
        return fits and self._is_combination(a, x)

    def _are_like(self, y: Tensor, *others: Tensor) -> bool:
        """Whether these are vectors like y, which is one of ours."""
        return all(
            is_ours(x, self._device) and x.shape == y.shape and x.is_contiguous() for x in others
        )


def _is_transpose(b: Tensor, a: Tensor) -> bool:
    """Whether it is a itself, transposed."""
    turned = b.shape == a.shape[::-1] and b.stride() == a.stride()[::-1]
    return turned and b.data_ptr() == a.data_ptr()
