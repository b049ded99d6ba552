"""Sums over the rows of matrices, and products with a few long vectors, the rows of a basis.

Rows are [count, n] and may have gaps between them. Partial sums are added in a fixed order.
"""

import torch
from torch import Tensor

from krylov_descent.cuda.triton import vector_kernels as kernels
from krylov_descent.cuda.triton.launching import SHORT, launch, multiprocessors, or_else
from krylov_descent.cuda.triton.split_fp16 import LARGEST, is_plain
from krylov_descent.runtime.ops import Operations, Span

# The least length of the rows of a basis, and the largest number of rows.
LEAST_COLUMNS, MOST_ROWS = 1 << 16, 1024
# Tile (rows, columns) of a product with a vector, for up to two rows and for more.
WIDE, DEEP = (2, 1024), (8, 256)
# Programs per multiprocessor that keep memory busy, in `project` and in `gram`.
PROJECTING, MULTIPLYING = 6, 2
# `gram`: rows of a block, pairs of blocks per program, columns per load, and loads per iteration.
BLOCK, PAIRS, COLUMNS, TIMES = 8, 8, 32, 2
# `gram` has 32-bit offsets, so its rows must span less memory than this many entries.
MOST_NUMBERS = 1 << 31
# Tile (rows, columns) of `sum_columns`.
STRIP = (32, 128)
# The largest numbers of partial sums of the two specialisations of `add_up_parts`, and the sums
# that one program computes in each.
PARTS, FEWER_PARTS = 1024, 64
SUMS, MORE_SUMS = 8, 64


class LongRows(Operations):
    """Operations on a few long vectors, the rows of a basis, by kernels where these support them.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def project(self, rows: Tensor, vector: Tensor, span: Span | None = None) -> Tensor:
        """By kernels that add partial sums in a fixed order."""
        if not self._are_long(rows, vector):
            return super().project(rows, vector, span)
        return project(rows, vector, span)

    def combine(
        self,
        rows: Tensor,
        coefficients: Tensor,
        start: Tensor | None = None,
        span: Span | None = None,
    ) -> Tensor:
        """By one kernel."""
        others = [] if start is None else [start]
        if not self._may_combine(rows, coefficients, span, *others):
            return super().combine(rows, coefficients, start, span)
        return combine(rows, coefficients, start, span=span)

    def subtract(
        self, vector: Tensor, rows: Tensor, coefficients: Tensor, span: Span | None = None
    ) -> Tensor:
        """By one kernel."""
        if not self._may_combine(rows, coefficients, span, vector):
            return super().subtract(vector, rows, coefficients, span)
        return combine(rows, coefficients, vector, -1, vector, span=span)

    def write_row(self, rows: Tensor, place: Tensor, vector: Tensor, scale: Tensor) -> None:
        """By one kernel."""
        if not (self._are_long(rows, vector) and is_plain(scale, self._device)):
            super().write_row(rows, place, vector, scale)
        else:
            write_row(rows, place, vector, scale)

    def gram(self, rows: Tensor, span: Span | None = None) -> Tensor:
        """By one pass over the rows."""
        if not self._are_long(rows) or len(rows) * rows.stride(0) >= MOST_NUMBERS:
            return super().gram(rows, span)
        return gram(rows, span)

    def _are_long(self, rows: Tensor, *vectors: Tensor) -> bool:
        """Whether the kernels support rows [k, n] with vectors [n]."""
        if not is_plain(rows, self._device) or rows.dim() != 2 or rows.stride(1) != 1:
            return False
        count, size = rows.shape
        fits = count <= MOST_ROWS and LEAST_COLUMNS <= size <= LARGEST
        return fits and all(self._is_vector(x, size) for x in vectors)

    def _may_combine(
        self, rows: Tensor, coefficients: Tensor, span: Span | None, *vectors: Tensor
    ) -> bool:
        count = len(rows) if span is None else span.most
        return self._are_long(rows, *vectors) and self._is_vector(coefficients, count)

    def _is_vector(self, x: Tensor, size: int) -> bool:
        return is_plain(x, self._device) and x.shape == (size,) and x.is_contiguous()


def combine(
    rows: Tensor,
    coefficients: Tensor,
    start: Tensor | None = None,
    sign: int = 1,
    out: Tensor | None = None,
    span: Span | None = None,
) -> Tensor:
    """start + sign · Σ_k coefficients[k] rows[k, :], a vector [n].

    Args:
        rows: [count, n].
        coefficients: [count].
        start: [n]; without it the sign is ignored.
        sign: 1 or -1.
        out: vector for the result, which may be the start; a new one by default.
        span: the rows to combine; all by default.
    """
    size = rows.shape[1]
    out = rows.new_empty(size) if out is None else out
    ends, count, spanned = _ends(rows, span)
    numbers = size, count, rows.stride(0), 0 if start is None else sign
    args = rows, coefficients, or_else(start, out), out, ends, *numbers
    launch(kernels.combine, (-(-size // SHORT), 1), args, (spanned, SHORT))
    return out


def write_row(rows: Tensor, place: Tensor, vector: Tensor, scale: Tensor) -> None:
    """See `Operations.write_row`."""
    size = rows.shape[1]
    args = rows, vector, scale, place, size, rows.stride(0)
    launch(kernels.write_row, (-(-size // SHORT), 1), args, (SHORT,))


def project(rows: Tensor, vector: Tensor, span: Span | None = None) -> Tensor:
    """The inner products [count] of rows [count, n], or of those of a span, with a vector [n]."""
    size = rows.shape[1]
    ends, count, spanned = _ends(rows, span)
    tile = WIDE if count <= WIDE[0] else DEEP
    programs, width = _spans(rows, tile[1], PROJECTING)
    parts, out = rows.new_empty(programs, count), rows.new_empty(count)
    args = rows, vector, parts, ends, size, count, rows.stride(0), width
    launch(kernels.project, (programs, 1), args, (spanned, *tile))
    add_up_parts(parts, out)
    return out


def gram(rows: Tensor, span: Span | None = None) -> Tensor:
    """The inner products [count, count] between rows [count, n], in the precision of float32.

    Args:
        rows: [count, n].
        span: the rows that are not zero; all by default.
    """
    size = rows.shape[1]
    ends, count, spanned = _ends(rows, span)
    blocks = -(-count // BLOCK)
    groups = -(-blocks * (blocks + 1) // 2 // PAIRS)
    programs, width = _spans(rows, TIMES * COLUMNS, MULTIPLYING, groups)
    parts, out = rows.new_empty(programs, count * count), rows.new_empty(count, count)
    args = rows, parts, ends, size, count, rows.stride(0), width
    constants = spanned, BLOCK, PAIRS, COLUMNS, TIMES
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


def _ends(rows: Tensor, span: Span | None) -> tuple[Tensor, int, bool]:
    """What kernels need of a span: its ends, the most rows, and whether there is one."""
    return (rows, len(rows), False) if span is None else (span.ends, span.most, True)


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
