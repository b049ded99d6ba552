"""Products of matrices, and sums over the rows of one: what layers are made of."""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton import vectors
from krylov_descent.cuda.triton.layouts import is_ours, is_rows
from krylov_descent.cuda.triton.lazy_products import Pending
from krylov_descent.cuda.triton.long_vectors import LongVectors
from krylov_descent.cuda.triton.split_fp16 import Halves, Product
from krylov_descent.runtime.precision import SETTINGS

aten = torch.ops.aten
# Fewer multiplications than this are as fast elsewhere; longer sums are none of a layer's (all
# inner products between the rows of a basis, say).
LEAST_WORK, LONGEST_SUM = 1 << 15, 1 << 17
# The same where each product has to make its halves by itself, which takes up to four kernels.
LEAST_WORK_ALONE = 1 << 27


class Matrices:
    """What is done with them by kernels of ours, or by torch.

    Args:
        device: the GPU.
        pending: what is still to be made.
        long_vectors: for a product that is the inner products between a few of those.
        sparing: whether large products alone are ours.
    """

    def __init__(
        self, device: torch.device, pending: Pending, long_vectors: LongVectors, *, sparing: bool
    ) -> None:
        self._device, self._pending, self._long_vectors = device, pending, long_vectors
        self._sparing = sparing

    def mm(self, a: Tensor, b: Tensor) -> Any:
        """a [M, K] times b [K, N], in place of torch's; it may wait."""
        of_rows = self._long_vectors.is_gram(a, b)
        found = self._long_vectors.gram(a) if of_rows else self._product(a, b)
        return aten.mm.default(*self._pending.all_settled(a, b)) if found is None else found

    def mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        """The same, written to a place."""
        fits = is_rows(out, self._device) and out.shape == (a.shape[0], b.shape[1])
        found = self._product(a, b, out=out) if fits else None
        return aten.mm.out(a, b, out=out) if found is None else found

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Any:
        """The same plus bias [N]; it may wait."""
        plain = not factors and is_ours(bias, self._device) and bias.is_contiguous()
        found = self._product(a, b, bias) if plain and bias.shape == b.shape[1:] else None
        if found is not None:
            return found
        return aten.addmm.default(*self._pending.all_settled(bias, a, b), **factors)

    def sums_over_rows(self, x: Tensor, *, squares: bool, out: Tensor | None = None) -> Any:
        """Σ x over rows [columns], and with squares their sum [columns] behind it; or None."""
        if not (x.dim() == 2 and is_rows(x, self._device) and halves.fits(x)):
            return None
        self._pending.settled(x)
        return vectors.sum_columns(x.detach(), squares=squares, out=out)

    def product_of_squares(self, a: Tensor, b: Tensor) -> Tensor | None:
        """(a²)ᵀ b² for a [m, outputs] and b [m, inputs], with the digits of tf32; or None."""
        fits = all(x.dim() == 2 and is_rows(x, self._device) and halves.fits(x) for x in (a, b))
        if SETTINGS.fp32_precision not in ("none", "tf32") or not fits or len(a) > LONGEST_SUM:
            return None
        of_a, of_b = self._squared(a), self._squared(b)
        return halves.product(Product(of_a, of_b, a_along=False, b_along=False, three=False))

    def _squared(self, x: Tensor) -> Halves:
        rows = x.detach()
        found = self._pending.halves_of(rows, three=False)
        return halves.square(found, self._pending.bound_of(rows))

    def _product(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """a [M, K] times b [K, N] plus bias [N]; None where it is better made elsewhere."""
        precision, least = SETTINGS.fp32_precision, LEAST_WORK
        if self._sparing:
            precision, least = "ieee" if precision == "tf32" else precision, LEAST_WORK_ALONE
        ours = is_ours(a, self._device) and is_ours(b, self._device)
        if precision not in ("none", "tf32") or not ours:
            return None
        if not a.dim() == b.dim() == 2 or a.shape[1] != b.shape[0]:
            return None  # torch says what is wrong
        (m, k), n = a.shape, b.shape[1]
        if m * n * k < least or min(m, n) < 2 or k > LONGEST_SUM or m * n > halves.LARGEST:
            return None
        a_along, b_along = a.stride(1) == 1, b.stride(0) == 1
        rows_of_a, rows_of_b = a if a_along else a.t(), b.t() if b_along else b
        if not all(_has_rows(rows) and halves.fits(rows) for rows in (rows_of_a, rows_of_b)):
            return None
        three = precision == "none"
        # A weight gradient is the last of its kind: nothing is made of it.
        waits = a_along and out is None and not self._sparing
        if bias is not None:
            self._pending.settled(bias)
        of_b = self._pending.halves_of(rows_of_b, three)
        of_a = self._pending.halves_of(rows_of_a, three)
        product = Product(of_a, of_b, a_along, b_along, three, bias)
        return self._pending.wait(product) if waits else halves.product(product, out=out)


def _has_rows(x: Tensor) -> bool:
    """Whether it lies in memory row by row."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]
