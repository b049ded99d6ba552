"""A few long vectors, the rows of a basis: products with them, and between them.

All rows are [count, n] and may have gaps between them. Sums are made in parts, always in the same
order.
"""

import torch
from torch import Tensor

from krylov_descent.cuda.triton import basis_kernels as kernels
from krylov_descent.cuda.triton.launching import SHORT, launch, multiprocessors, or_else
from krylov_descent.cuda.triton.vectors import PARTS, add_up_parts

# Rows and columns that are multiplied with a vector at a time, of few rows and of more.
WIDE, DEEP = (2, 1024), (8, 256)
# So many programs of a multiprocessor have enough to wait for that memory is always busy.
PROJECTING, MULTIPLYING = 6, 2
# Rows that are multiplied with others, such pairs for a program, columns at a time, and how often
# before the next are read.
BLOCK, PAIRS, COLUMNS, TIMES = 8, 8, 32, 2
# Numbers that one program adds up at a time, and the most rows that are known there.
TOGETHER, MOST_ROWS = 2048, 256
# Less than this, `gram` finds its numbers in memory by 32 bits.
MOST_NUMBERS = 1 << 31


def combine(
    rows: Tensor, coefficients: Tensor, start: Tensor | None = None, sign: int = 1
) -> Tensor:
    """Σ_k coefficients[k] rows[k, :], a vector [n]; or the start and that.

    Args:
        rows: [count, n].
        coefficients: [count].
        start: [n].
        sign: of the sum, where it is added to the start.
    """
    out = rows.new_empty(rows.shape[1])
    return add_combination(rows, coefficients, start, sign, out)


def add_combination(
    rows: Tensor,
    coefficients: Tensor,
    start: Tensor | None,
    sign: int,
    out: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """The same, written to a place, which may be the start; with weights [n] for its numbers."""
    count, size = rows.shape
    vectors = or_else(start, out), or_else(weights, out), out
    flags = 0 if start is None else sign, int(weights is not None)
    args = rows, coefficients, *vectors, size, count, rows.stride(0), *flags
    launch(kernels.combine, (-(-size // SHORT), 1), args, (SHORT,))
    return out


def subtract_rows(
    start: Tensor, divisor: Tensor | None, rows: Tensor, coefficients: Tensor, w: Tensor
) -> Tensor:
    """start / divisor - Σ_k coefficients[k] rows[k, :] in place of the start; its product with w.

    Args:
        start: [n].
        divisor: [n], or None for 1.
        rows: [count, n].
        coefficients: [count].
        w: [n], which may be the start, as that was before.

    Returns:
        Parts that add up to the product.
    """
    count, size = rows.shape
    programs = -(-size // SHORT)
    parts, divided = rows.new_empty(programs), int(divisor is not None)
    vectors = start, or_else(divisor, start), w
    args = rows, coefficients, *vectors, parts, size, count, rows.stride(0), divided
    launch(kernels.remainder, (programs, 1), args, (SHORT,))
    return parts


def scale_of_length(squared: Tensor, least: float, before: Tensor, place: Tensor) -> Tensor:
    """1 / √squared, and the square at its place; zero where it is not above least · before."""
    scale = torch.empty_like(squared)
    launch(kernels.scale_of_length, (1, 1), (squared, before, place, scale, least), ())
    return scale


def scale_of_remainder(
    parts: Tensor, taken: Tensor, along: Tensor, least: float, projected: Tensor, place: Tensor
) -> Tensor:
    """The same of a vector from which multiples of rows were taken.

    Args:
        parts: of its squared length.
        taken: the multiples [count].
        along: what was taken of the last rows before [up to count].
        least: below this times the squared length of everything it is nothing.
        projected: for all that was taken [count].
        place: for the squared length.
    """
    scale = torch.empty_like(place)
    sizes = parts.numel(), taken.numel(), along.numel()
    args = parts, taken, along, projected, place, scale, *sizes, least
    launch(kernels.scale_of_remainder, (1, 1), args, (TOGETHER, MOST_ROWS), num_warps=8)
    return scale


def project(rows: Tensor, vector: Tensor) -> Tensor:
    """Σ_c rows[k, c] vector[c] for each row [count].

    Args:
        rows: [count, n].
        vector: [n].
    """
    count, size = rows.shape
    tile = WIDE if count <= WIDE[0] else DEEP
    programs, span = _spans(rows, tile[1], PROJECTING)
    parts, out = rows.new_empty(programs, count), rows.new_empty(count)
    args = rows, vector, parts, size, count, rows.stride(0), span
    launch(kernels.project, (programs, 1), args, tile)
    add_up_parts(parts, out)
    return out


def gram(rows: Tensor) -> Tensor | None:
    """Σ_c rows[k, c] rows[l, c] for each two rows [count, count], with the digits of float32.

    None where there are too many numbers.

    Args:
        rows: [count, n].
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


def _spans(rows: Tensor, columns: int, of_each: int, groups: int = 1) -> tuple[int, int]:
    """How many programs there are for the rows, and how many columns each of them has.

    Args:
        rows: [count, n].
        columns: what a program has is a multiple of so many.
        of_each: programs for each multiprocessor, at most.
        groups: so many times there are as many programs.
    """
    size = rows.shape[1]
    most = max(1, min(of_each * multiprocessors(rows.get_device()) // groups, PARTS))
    span = -(-size // most // columns) * columns
    return -(-size // span), span
