"""Sums over the rows of matrices, and products with a few long vectors, the rows of a basis.

`BasisVectors` replaces torch's mv, addmv and mm for tensors that the kernels support. Rows are
[count, n] and may have gaps between them. Partial sums are added in a fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import vector_kernels as kernels
from krylov_descent.cuda.triton.launching import SHORT, launch, multiprocessors, or_else
from krylov_descent.cuda.triton.lazy_products import LazyProducts
from krylov_descent.cuda.triton.split_fp16 import LARGEST, is_plain

aten = torch.ops.aten
# The least length of the rows of a basis, and the largest number of rows.
LEAST_COLUMNS, MOST_ROWS = 1 << 16, 256
# Tile (rows, columns) of a product with a vector, for up to two rows and for more.
WIDE, DEEP = (2, 1024), (8, 256)
# Programs per multiprocessor that keep memory busy, in `project` and in `gram`.
PROJECTING, MULTIPLYING = 6, 2
# `gram`: rows of a block, pairs of blocks per program, columns per load, and loads per iteration.
BLOCK, PAIRS, COLUMNS, TIMES = 8, 8, 32, 2
# Partial sums that `scale_of_remainder` adds per iteration.
TOGETHER = 2048
# `gram` has 32-bit offsets, so its rows must span less memory than this many entries.
MOST_NUMBERS = 1 << 31
# Tile (rows, columns) of `sum_columns`.
STRIP = (32, 128)
# The largest numbers of partial sums of the two specialisations of `add_up_parts`, and the sums
# that one program computes in each.
PARTS, FEWER_PARTS = 1024, 64
SUMS, MORE_SUMS = 8, 64


class BasisVectors:
    """Operations on the rows of a basis, by kernels or by torch.

    Args:
        lazy: the lazy products of the recording.
    """

    def __init__(self, lazy: LazyProducts) -> None:
        self._device, self._cache, self._lazy = lazy.device, lazy.cache, lazy

    def is_gram(self, a: Tensor, b: Tensor) -> bool:
        """Whether b is aᵀ and a has a few long rows, so that ab is a Gram matrix."""
        if not (self._are_long_rows(a) and is_plain(b, self._device)):
            return False
        turned = b.shape == a.shape[::-1] and b.stride() == a.stride()[::-1]
        return turned and b.data_ptr() == a.data_ptr()

    def gram(self, rows: Tensor) -> Tensor | None:
        """The Gram matrix [count, count] of rows; None if they span too much memory."""
        self._lazy.materialise(rows)
        return gram(rows)

    def mv(self, a: Tensor, x: Tensor) -> Any:
        """a [m, n] times x [n]: a projection on rows, or a linear combination of rows."""
        self._lazy.materialise(a, x)
        if self._is_vector(x, a.shape[1:]) and self._are_long_rows(a):
            return project(a, x)
        if self._is_combination(a, x):
            return combine(a.t(), x)
        return aten.mv.default(a, x)

    def addmv(self, y: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Any:
        """y [m] plus a [m, n] times x [n]; all arguments are materialised."""
        if not factors and self._may_join(y, a, x):
            return combine(a.t(), x, y)
        return aten.addmv.default(y, a, x, **factors)

    def addmv_(self, y: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Any:
        """Add a [m, n] times x [n] to y [m] in place, or subtract it if alpha is -1."""
        sign = factors.get("alpha", 1)
        if set(factors) <= {"alpha"} and sign in (1, -1) and self._may_join(y, a, x):
            return combine(a.t(), x, y, int(sign), y)
        return aten.addmv_.default(y, a, x, **factors)

    def scale_of_length(
        self, squared: Tensor, least: float, before: Tensor, place: Tensor
    ) -> Tensor | None:
        """See `Operations`; None if unsupported."""
        if not all(is_plain(x, self._device) for x in (squared, before, place)):
            return None
        self._lazy.materialise(squared, before)
        return scale_of_length(squared, least, before, place)

    def subtract_combination(
        self, w: Tensor, rows: Tensor, coefficients: Tensor, weights: Tensor
    ) -> bool:
        """See `Operations`; False if unsupported."""
        if not (self._may_join(w, rows.t(), coefficients) and self._is_vector(weights, w.shape)):
            return False
        self._lazy.materialise_readers_of([w])
        self._lazy.materialise(w, rows, coefficients, weights)
        combine(rows, coefficients, w, -1, w, weights)
        self._cache.forget(w)
        return True

    def subtract_rows(
        self, start: Tensor, divisor: Tensor | None, rows: Tensor, taken: Tensor, w: Tensor
    ) -> Tensor | None:
        """See `Operations`; None if unsupported."""
        others = [w] if divisor is None else [w, divisor]
        fits = all(self._is_vector(x, start.shape) for x in others)
        if not (self._may_join(start, rows.t(), taken) and fits):
            return None
        self._lazy.materialise_readers_of([start])
        self._lazy.materialise(start, rows, taken, *others)
        parts = subtract_rows(start, divisor, rows, taken, w)
        self._cache.forget(start)
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
        """See `Operations`."""
        self._lazy.materialise_readers_of([projected, place])
        self._lazy.materialise(parts, taken, along)
        scale = scale_of_remainder(parts, taken, along, least, projected, place)
        self._cache.forget(projected)
        self._cache.forget(place)
        return scale

    def _are_long_rows(self, rows: Tensor) -> bool:
        """Whether a matrix consists of a few long rows, like a basis."""
        if not is_plain(rows, self._device) or rows.dim() != 2 or rows.stride(1) != 1:
            return False
        count, size = rows.shape
        return count <= MOST_ROWS and LEAST_COLUMNS <= size <= LARGEST

    def _is_vector(self, x: Tensor, shape: torch.Size) -> bool:
        return is_plain(x, self._device) and x.shape == shape and x.is_contiguous()

    def _is_combination(self, a: Tensor, x: Tensor) -> bool:
        """Whether a [n, count] times x is a linear combination of a few long rows."""
        fits = self._is_vector(x, a.shape[1:])
        return fits and a.dim() == 2 and self._are_long_rows(a.t())

    def _may_join(self, y: Tensor, a: Tensor, x: Tensor) -> bool:
        """Whether y + ax is supported: y is a vector, and ax a combination of long rows."""
        return self._is_vector(y, a.shape[:1]) and self._is_combination(a, x)


def combine(
    rows: Tensor,
    coefficients: Tensor,
    start: Tensor | None = None,
    sign: int = 1,
    out: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """start + sign · weights ∘ Σ_k coefficients[k] rows[k, :], a vector [n].

    Args:
        rows: [count, n].
        coefficients: [count].
        start: [n]; without it the sign is ignored.
        sign: 1 or -1.
        out: vector for the result, which may be the start; a new one by default.
        weights: [n]; ones by default.
    """
    count, size = rows.shape
    out = rows.new_empty(size) if out is None else out
    vectors = or_else(start, out), or_else(weights, out), out
    flags = 0 if start is None else sign, int(weights is not None)
    args = rows, coefficients, *vectors, size, count, rows.stride(0), *flags
    launch(kernels.combine, (-(-size // SHORT), 1), args, (SHORT,))
    return out


def subtract_rows(
    start: Tensor, divisor: Tensor | None, rows: Tensor, coefficients: Tensor, w: Tensor
) -> Tensor:
    """See `Operations.subtract_rows`."""
    count, size = rows.shape
    programs = -(-size // SHORT)
    parts, divided = rows.new_empty(programs), int(divisor is not None)
    vectors = start, or_else(divisor, start), w
    args = rows, coefficients, *vectors, parts, size, count, rows.stride(0), divided
    launch(kernels.remainder, (programs, 1), args, (SHORT,))
    return parts


def scale_of_length(squared: Tensor, least: float, before: Tensor, place: Tensor) -> Tensor:
    """See `Operations.scale_of_length`."""
    scale = torch.empty_like(squared)
    launch(kernels.scale_of_length, (1, 1), (squared, before, place, scale, least), ())
    return scale


def scale_of_remainder(
    parts: Tensor, taken: Tensor, along: Tensor, least: float, projected: Tensor, place: Tensor
) -> Tensor:
    """See `Operations.scale_of_remainder`."""
    scale = torch.empty_like(place)
    sizes = parts.numel(), taken.numel(), along.numel()
    args = parts, taken, along, projected, place, scale, *sizes, least
    launch(kernels.scale_of_remainder, (1, 1), args, (TOGETHER, MOST_ROWS), num_warps=8)
    return scale


def project(rows: Tensor, vector: Tensor) -> Tensor:
    """The inner products [count] of rows [count, n] with a vector [n]."""
    count, size = rows.shape
    tile = WIDE if count <= WIDE[0] else DEEP
    programs, span = _spans(rows, tile[1], PROJECTING)
    parts, out = rows.new_empty(programs, count), rows.new_empty(count)
    args = rows, vector, parts, size, count, rows.stride(0), span
    launch(kernels.project, (programs, 1), args, tile)
    add_up_parts(parts, out)
    return out


def gram(rows: Tensor) -> Tensor | None:
    """The inner products [count, count] between rows [count, n], in the precision of float32.

    None if the rows span too much memory.
    """
    count, size = rows.shape
    if count * rows.stride(0) >= MOST_NUMBERS:
        return None
    blocks = -(-count // BLOCK)
    groups = -(-blocks * (blocks + 1) // 2 // PAIRS)
    programs, span = _spans(rows, TIMES * COLUMNS, MULTIPLYING, groups)
    parts, out = rows.new_empty(programs, count * count), rows.new_empty(count, count)
    args = rows, parts, size, count, rows.stride(0), span
    constants = BLOCK, PAIRS, COLUMNS, TIMES
    launch(kernels.gram, (programs, groups), args, constants, num_warps=PAIRS)
    add_up_parts(parts, out, symmetric=True)
    return out


def sum_columns(x: Tensor, *, squares: bool, out: Tensor | None = None) -> Tensor:
    """Σ_r x[r, c] [columns]; with squares followed by Σ_r x[r, c]², [2 · columns] in all.

    Args:
        x: [rows, columns], contiguous.
        squares: whether to add up squares, too.
        out: contiguous vector for the result; a new one by default.
    """
    rows, columns = x.shape
    width = columns * (1 + squares)
    out = x.new_empty(width) if out is None else out
    deep, wide = STRIP
    blocks = -(-columns // wide)
    most = max(1, min(2 * multiprocessors(x.get_device()) // blocks, PARTS))
    span = -(-rows // most // deep) * deep
    programs = -(-rows // span)
    parts = out if programs == 1 else x.new_empty(programs, width)
    args = x, parts, rows, columns, span
    launch(kernels.sum_columns, (blocks, programs), args, (squares, deep, wide))
    if programs > 1:
        add_up_parts(parts, out)
    return out


def add_up_parts(parts: Tensor, out: Tensor, *, symmetric: bool = False) -> None:
    """Write Σ parts over programs to out.

    Args:
        parts: [programs, count].
        out: [count], or a matrix with count entries.
        symmetric: whether out is a symmetric matrix and parts have only its lower triangle.
    """
    programs, count = parts.shape
    # Only two specialisations, to save compile time.
    most, sums = (FEWER_PARTS, MORE_SUMS) if programs <= FEWER_PARTS else (PARTS, SUMS)
    args = parts, out, programs, count, len(out) if symmetric else 0
    launch(kernels.add_up_parts, (-(-count // sums), 1), args, (most, sums), num_warps=8)


def _spans(rows: Tensor, columns: int, of_each: int, groups: int = 1) -> tuple[int, int]:
    """The number of programs along the columns of rows, and the columns of each program.

    Args:
        rows: [count, n].
        columns: the columns of a program are a multiple of this number.
        of_each: largest number of programs per multiprocessor.
        groups: number of programs that share the same columns.
    """
    size = rows.shape[1]
    most = max(1, min(of_each * multiprocessors(rows.get_device()) // groups, PARTS))
    span = -(-size // most // columns) * columns
    return -(-size // span), span
