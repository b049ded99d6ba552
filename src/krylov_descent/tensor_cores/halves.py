"""A float32 matrix as the sum of two in fp16, and products of such matrices on tensor cores.

x = (x₁ + x₂) / s, where the scale s is a power of two that the GPU finds by itself. Then
abᵀ = (a₁b₁ᵀ + a₁b₂ᵀ + a₂b₁ᵀ) / st, but for what is smaller than a float32 has digits: three
products, which together take a third of the time of one in float32. The first of them alone has the
digits of tf32, in less time.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.losses import first_line
from krylov_descent.tensor_cores import kernels

# Tiles of the result, how much of the sum at a time, warps, stages of the pipeline.
SMALL, WIDE, LARGE = (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3)
# Rows and columns of halves are filled up with zeros to multiples of this.
EVEN = 16
# What is gone through number by number is so in blocks of this many of them; short ones where each
# number of the result is made of several.
BLOCK, SHORT = 2048, 512
# Columns of a block, where a matrix has no more of them.
NARROW = 64

# Kernels count in int32, and blocks of columns in 16 bits.
LARGEST, MOST_COLUMNS = 1 << 28, 1 << 20

_compiled: dict[tuple[Any, ...], Any] = {}


@dataclass(frozen=True, slots=True)
class Halves:
    """What tensor cores multiply in place of a float32 matrix.

    Attributes:
        rows, columns: of the matrix.
        high, low: both halves, filled up, times the scale.
        unscale: what undoes the scale [1].
    """

    rows: int
    columns: int
    high: Tensor
    low: Tensor
    unscale: Tensor


def find_bound(x: Tensor, bound: Tensor) -> None:
    """Raise the bound [1], an int32, to the largest absolute value of a matrix."""
    rows, columns = x.shape
    unit, grid, sizes = _blocks(x, rows, columns)
    args = (x, bound, rows, columns // unit, x.stride(0) // unit)
    _launch(kernels.find_bound, grid, args, (unit, *sizes))


def split(
    x: Tensor,
    bound: Tensor,
    other_bound: Tensor,
    kind: int = kernels.NOTHING,
    y: Tensor | None = None,
    out: Tensor | None = None,
) -> Halves:
    """The halves of a matrix [rows, columns], or of a function of it.

    Args:
        x: rows may have gaps between them.
        bound: of x and, in sum with the other one, of the function; each [1], an int32.
        other_bound: see there.
        kind: of the function, one of those in `kernels`.
        y: its second argument, without gaps.
        out: for its values, without gaps.
    """
    rows, columns = x.shape
    width, padded = _filled_up(columns), _filled_up(rows)
    high, low = x.new_empty(2, padded, width, dtype=torch.half)
    unscale = x.new_empty(1)
    unit, grid, sizes = _blocks(x, padded, width)
    args = (
        x,
        x if y is None else y,
        x if out is None else out,
        high,
        low,
        unscale,
        bound,
        other_bound,
        rows,
        columns // unit,
        x.stride(0) // unit,
        width,
        padded,
    )
    _launch(kernels.split, grid, args, (kind, unit, *sizes))
    return Halves(rows, columns, high, low, unscale)


def product(
    a: Halves,
    b: Halves,
    *,
    a_along: bool,
    b_along: bool,
    three: bool,
    bias: Tensor | None = None,
    bound: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Σ_k a[m, k] b[n, k] + bias[n] as a float32 matrix [M, N].

    Args:
        a: [M, K], or [K, M] if its rows are not along k.
        b: [N, K], or [K, N] likewise.
        a_along: whether rows of a are along k.
        b_along: whether rows of b are.
        three: whether to have the digits of float32, rather than of tf32.
        bias: [N].
        bound: of the result [1], which is zero at first.
        out: for the result, without gaps between rows; a new matrix where not given.
    """
    m, k = (a.rows, a.columns) if a_along else (a.columns, a.rows)
    n = b.rows if b_along else b.columns
    places = _multiprocessors(a.high.get_device())
    shape, shares = _shape(m, n, k, three=three, places=places)
    shares = 1 if bias is not None or bound is not None else shares
    rows, columns, depth, warps, stages = shape
    out = a.unscale.new_empty(m, n) if out is None else out
    parts = out if shares == 1 else a.unscale.new_empty(shares, m, n)
    depth_in_all = _filled_up(k)
    args = (
        a.high,
        a.low,
        b.high,
        b.low,
        a.unscale,
        b.unscale,
        out if bias is None else bias,
        a.unscale.view(torch.int32) if bound is None else bound,
        parts,
        m,
        n,
        depth_in_all,
        a.high.shape[1],
        b.high.shape[1],
        -(-depth_in_all // shares // depth) * depth,
        int(bias is not None),
        int(bound is not None),
    )
    grid = -(-m // rows) * -(-n // columns), shares
    constants = a_along, b_along, three, rows, columns, depth
    _launch(kernels.product, grid, args, constants, num_warps=warps, num_stages=stages)
    if shares > 1:
        size = out.numel()
        _launch(kernels.add_up, (-(-size // SHORT), 1), (parts, out, size, shares), (SHORT,))
    return out


def combine(
    rows: Tensor, coefficients: Tensor, start: Tensor | None = None, sign: int = 1
) -> Tensor:
    """Σ_k coefficients[k] rows[k, :], a vector [n]; or added to the start, in place.

    Args:
        rows: [count, n], which may have gaps between them.
        coefficients: [count].
        start: [n].
        sign: of the sum, where it is added to the start.
    """
    count, size = rows.shape
    out = rows.new_empty(size) if start is None else start
    used = 0 if start is None else sign
    args = rows, coefficients, out, out, size, count, rows.stride(0), used
    _launch(kernels.combine, (-(-size // SHORT), 1), args, (SHORT,))
    return out


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    """Of each number, between its sigmoid and a target; both without gaps."""
    out = torch.empty_like(x)
    grid = -(-x.numel() // BLOCK), 1
    _launch(kernels.cross_entropy, grid, (x, target, out, x.numel()), (BLOCK,))
    return out


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    args: Sequence[Any],
    constants: Sequence[Any],
    **options: Any,
) -> None:
    """Launch a kernel; by Triton's way for the first of its kind, and a shorter one for the others.

    Args:
        kernel: one of `kernels`.
        grid: blocks along both axes.
        args: of the kernel. Where they are numbers that Triton may know to be multiples of 16, they
            always are.
        constants: those in capitals, which come last.
        options: that go with the constants.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    aligned = [tensor.data_ptr() % 16 == 0 for tensor in tensors]
    kind = (kernel.__name__, tensors[0].get_device(), *constants, *aligned)
    compiled = _compiled.get(kind)
    try:
        if compiled is None:
            _compiled[kind] = kernel[grid](*args, *constants, **options)
        else:
            compiled[(*grid, 1)](*args, *constants)
    except RuntimeError:
        raise
    except Exception as problem:  # Triton's own are none of torch's
        raise RuntimeError(f"a kernel of Triton failed: {first_line(problem)}") from problem


def fits(rows: Tensor) -> bool:
    """Whether a matrix that lies in memory row by row is none too large for the kernels."""
    count, columns = rows.shape
    return (
        _filled_up(count) * _filled_up(columns) <= LARGEST
        and count * rows.stride(0) <= LARGEST
        and columns <= MOST_COLUMNS
    )


def _filled_up(count: int) -> int:
    return -(-count // EVEN) * EVEN


def _blocks(x: Tensor, rows: int, columns: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """How many numbers of a row can be read at once, the number of blocks, and their sizes."""
    wide = columns > NARROW
    c = 4 * NARROW if wide else NARROW
    even = x.data_ptr() % 16 == 0 and x.stride(0) % 4 == 0 and x.shape[1] % 4 == 0
    return 4 if wide and even else 1, (-(-rows * c // BLOCK), -(-columns // c)), (BLOCK // c, c)


def _shape(
    m: int, n: int, k: int, *, three: bool, places: int
) -> tuple[tuple[int, int, int, int, int], int]:
    """Of the tiles, and into how many shares to divide the sum so that there are enough of them.

    Args:
        m: rows of the product.
        n: columns of it.
        k: terms of the sum.
        three: whether there are three products.
        places: multiprocessors, which have a large tile each at a time, or two small ones.
    """
    # Measured on an H200; of three products a large tile takes 1.7 times as long as two small ones.
    small, large = -(-m // 64) * -(-n // 64), -(-m // 128) * -(-n // 128)
    if three:
        shape = LARGE if 1.7 * -(-large // places) <= -(-small // (2 * places)) else SMALL
    else:
        shape = LARGE if large >= 4 * places else WIDE if small >= 2 * places else SMALL
    if k >= 8192 and large >= 8:
        shape = LARGE
    tiles = -(-m // shape[0]) * -(-n // shape[1])
    return shape, max(1, min(2 * places // tiles, k // 256))


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
