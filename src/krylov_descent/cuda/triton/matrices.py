"""The matrix operations of layers: products, and sums over rows."""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import split_fp16, vectors
from krylov_descent.cuda.triton.lazy_products import LazyProducts
from krylov_descent.cuda.triton.split_fp16 import Product, SplitMatrix, is_plain, is_rows
from krylov_descent.runtime.precision import SETTINGS

aten = torch.ops.aten
# With fewer multiplications torch is as fast; sums in layers are not longer.
LEAST_WORK, LONGEST_SUM = 1 << 15, 1 << 17
# Least multiplications in sparing mode, where each product splits its matrices: up to 4 kernels.
LEAST_WORK_ALONE = 1 << 27


class Matrices:
    """Replaces torch's products of matrices.

    Args:
        lazy: the lazy products of the recording.
        sparing: whether torch computes all but large products.
    """

    def __init__(self, lazy: LazyProducts, *, sparing: bool) -> None:
        self._lazy, self._sparing = lazy, sparing
        self._device = lazy.device

    def mm(self, a: Tensor, b: Tensor) -> Any:
        """a [M, K] times b [K, N]; the result may be lazy."""
        found = self._product(a, b)
        return aten.mm.default(*self._lazy.materialise(a, b)) if found is None else found

    def mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        """a [M, K] times b [K, N], computed at once and written to out [M, N]."""
        fits = is_rows(out, self._device) and out.shape == (a.shape[0], b.shape[1])
        found = self._product(a, b, out=out) if fits else None
        return aten.mm.out(a, b, out=out) if found is None else found

    def addmm(self, bias: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Any:
        """a [M, K] times b [K, N] plus bias [N]; the result may be lazy."""
        plain = not factors and is_plain(bias, self._device) and bias.is_contiguous()
        found = self._product(a, b, bias) if plain and bias.shape == b.shape[1:] else None
        if found is not None:
            return found
        return aten.addmm.default(*self._lazy.materialise(bias, a, b), **factors)

    def sums_over_rows(
        self, x: Tensor, *, squares: bool, out: Tensor | None = None
    ) -> Tensor | None:
        """Σ x over rows [n], with squares followed by Σ x² [n]; None if unsupported.

        See `Operations.sums_over_rows` and `sums_over_samples`.
        """
        if not self._is_matrix(x):
            return None
        self._lazy.materialise(x)
        return vectors.sum_columns(x.detach(), squares=squares, out=out)

    def product_of_squares(self, a: Tensor, b: Tensor) -> Tensor | None:
        """(a²)ᵀ b² of a [m, outputs] and b [m, inputs], as precise as tf32; None if unsupported."""
        rough = SETTINGS.fp32_precision in ("none", "tf32")
        if not (rough and self._is_matrix(a) and self._is_matrix(b)) or len(a) > LONGEST_SUM:
            return None
        of_a, of_b = self._squared(a), self._squared(b)
        return split_fp16.product(Product(of_a, of_b, a_along=False, b_along=False, exact=False))

    def _squared(self, x: Tensor) -> SplitMatrix:
        rows = x.detach()
        found = self._lazy.split_of(rows, exact=False)
        return split_fp16.square(found, self._lazy.bound_of(rows))

    def _is_matrix(self, x: Tensor) -> bool:
        return x.dim() == 2 and is_rows(x, self._device) and split_fp16.fits(x)

    def _product(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """a [M, K] times b [K, N] plus bias [N]; None if torch has to compute it."""
        precision, least = SETTINGS.fp32_precision, LEAST_WORK
        if self._sparing:
            precision, least = "ieee" if precision == "tf32" else precision, LEAST_WORK_ALONE
        plain = is_plain(a, self._device) and is_plain(b, self._device)
        if precision not in ("none", "tf32") or not plain:
            return None
        if not a.dim() == b.dim() == 2 or a.shape[1] != b.shape[0]:
            return None  # torch raises the error
        (m, k), n = a.shape, b.shape[1]
        if m * n * k < least or min(m, n) < 2 or k > LONGEST_SUM or m * n > split_fp16.LARGEST:
            return None
        a_along, b_along = a.stride(1) == 1, b.stride(0) == 1
        rows_of_a, rows_of_b = a if a_along else a.t(), b.t() if b_along else b
        if not all(_has_rows(rows) and split_fp16.fits(rows) for rows in (rows_of_a, rows_of_b)):
            return None
        exact = precision == "none"
        if bias is not None:
            self._lazy.materialise(bias)
        of_b = self._lazy.split_of(rows_of_b, exact=exact)
        of_a = self._lazy.split_of(rows_of_a, exact=exact)
        product = Product(of_a, of_b, a_along, b_along, exact, bias)
        if a_along and out is None and not self._sparing:
            return self._lazy.defer(product)
        # A weight gradient is not deferred, because no function of it follows.
        return split_fp16.product(product, out=out)


def _has_rows(x: Tensor) -> bool:
    """Whether a matrix is stored row by row."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]
