"""Long vectors, and sums over rows and columns: what a step has besides products of matrices."""

import torch
from torch import Tensor

from krylov_descent.tensor_cores import vector_kernels as kernels
from krylov_descent.tensor_cores.launching import SHORT, launch, multiprocessors, or_else

# Rows and columns of a basis that are multiplied with a vector at a time.
SPAN = (8, 1024)
# Numbers of float32 that memory gives at once.
LINE = 32
# Rows and columns of a matrix whose rows are summed up at a time.
STRIP = (32, 128)
# The most parts that these are done in, and how many sums of so many are made at a time.
PARTS, FEWER_PARTS, FEW = 512, 64, 8
# So many numbers of a row are summed up side by side.
ROW = 1024


def combine(
    rows: Tensor, coefficients: Tensor, start: Tensor | None = None, sign: int = 1
) -> Tensor:
    """Σ_k coefficients[k] rows[k, :], a vector [n]; or the start and that.

    Args:
        rows: [count, n], which may have gaps between them.
        coefficients: [count].
        start: [n].
        sign: of the sum, where it is added to the start.
    """
    out = rows.new_empty(rows.shape[1])
    return add_combination(rows, coefficients, start, sign, out)


def add_combination(
    rows: Tensor, coefficients: Tensor, start: Tensor | None, sign: int, out: Tensor
) -> Tensor:
    """The same, written to a place, which may be the start."""
    count, size = rows.shape
    used = 0 if start is None else sign
    args = rows, coefficients, or_else(start, out), out, size, count, rows.stride(0), used
    launch(kernels.combine, (-(-size // SHORT), 1), args, (SHORT,))
    return out


def scale_and_add(x: Tensor, scale: Tensor, other: Tensor, factor: float) -> None:
    """x · scale + factor · other in place of x [n], for a scale on the GPU."""
    args = x, scale, other, x.numel(), factor
    launch(kernels.scale_and_add, (-(-x.numel() // SHORT), 1), args, (SHORT,))


def scale_of_length(squared: Tensor, least: float, before: Tensor, place: Tensor) -> Tensor:
    """1 / √squared, and the square at its place; zero where it is not above least · before."""
    scale = torch.empty_like(squared)
    launch(kernels.scale_of_length, (1, 1), (squared, before, place, scale, least), ())
    return scale


def project(rows: Tensor, vector: Tensor) -> Tensor:
    """Σ_c rows[k, c] vector[c] for each row [count].

    Args:
        rows: [count, n], which may have gaps between them.
        vector: [n].
    """
    count, size = rows.shape
    programs = min(2 * multiprocessors(rows.get_device()), PARTS)
    # All have the same to read, if the last time less than they could.
    span = -(-size // programs // LINE) * LINE
    programs = -(-size // span)
    parts, out = rows.new_empty(programs, count), rows.new_empty(count)
    args = rows, vector, parts, size, count, rows.stride(0), span
    launch(kernels.project, (programs, 1), args, SPAN, num_warps=8)
    _add_up_parts(parts, out)
    return out


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
        _add_up_parts(parts, out)
    return out


def _add_up_parts(parts: Tensor, out: Tensor) -> None:
    """out [count] = Σ parts [programs, count]."""
    programs, count = parts.shape
    # Two kinds are compiled, and no more.
    most, few = (FEWER_PARTS, PARTS // FEW) if programs <= FEWER_PARTS else (PARTS, FEW)
    args = parts, out, programs, count
    launch(kernels.add_up_parts, (-(-count // few), 1), args, (most, few))


def move(source: Tensor, target: Tensor) -> None:
    """Copy a few numbers; one of both is in the host's memory, and pinned."""
    size = source.numel()
    launch(kernels.move, (-(-size // ROW), 1), (source, target, size), (ROW,))


def cross_entropy(x: Tensor, target: Tensor, bound: Tensor) -> Tensor:
    """Of each row [rows, columns], between the sigmoid and a target; both without gaps.

    Args:
        x: before the sigmoid.
        target: like it.
        bound: to be raised to that of the targets [1].
    """
    rows, columns = x.shape
    out = x.new_empty(rows)
    launch(kernels.cross_entropy, (rows, 1), (x, target, out, bound, columns), (ROW,))
    return out
