"""Sums over the rows of a matrix, in parts that are always added in the same order."""

from torch import Tensor

from krylov_descent.cuda.triton import vector_kernels as kernels
from krylov_descent.cuda.triton.launching import launch, multiprocessors

# Rows and columns of a matrix whose rows are summed up at a time.
STRIP = (32, 128)
# The most parts that sums are made in, or fewer, and how many sums of them are made at a time.
PARTS, FEWER_PARTS = 1024, 64
SUMS, MORE_SUMS = 8, 64


def sum_columns(x: Tensor, *, squares: bool, out: Tensor | None = None) -> Tensor:
    """Σ x[r, c] over r, and with squares Σ x[r, c]² behind it: [columns], or twice that.

    Args:
        x: [rows, columns], without gaps.
        squares: whether those are wanted.
        out: for the result, without gaps; a new vector where not given.
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
    """out, of count numbers, = Σ parts [programs, count].

    Args:
        parts: [programs, count].
        out: [count], or a matrix.
        symmetric: whether it is a symmetric matrix, of which parts have the lower triangle alone.
    """
    programs, count = parts.shape
    # Two kinds are compiled, and no more.
    most, sums = (FEWER_PARTS, MORE_SUMS) if programs <= FEWER_PARTS else (PARTS, SUMS)
    args = parts, out, programs, count, len(out) if symmetric else 0
    launch(kernels.add_up_parts, (-(-count // sums), 1), args, (most, sums), num_warps=8)
