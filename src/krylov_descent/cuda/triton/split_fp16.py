"""A float32 matrix as the sum of two in fp16, and products of such matrices on tensor cores.

x = (x₁ + x₂) / s, where the scale s is a power of two that the GPU finds by itself. Then
abᵀ = (a₁b₁ᵀ + a₁b₂ᵀ + a₂b₁ᵀ) / st, but for what is smaller than a float32 has digits: three
products, which together take a third of the time of one in float32. The first of them alone has the
digits of tf32, in less time.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton.launching import SHORT, launch, multiprocessors, or_else

# Tiles of the result, how much of the sum at a time, warps, stages of the pipeline.
SMALL, WIDE, LARGE = (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3)
# Rows and columns of halves are filled up with zeros to multiples of this.
EVEN = 16
# What is gone through number by number is so in blocks of this many of them.
BLOCK = 2048
# Columns of a block, where a matrix has no more of them.
NARROW = 64

# Functions whose values are between -1 and 1.
BOUNDED_BY_ONE = (kernels.SIGMOID, kernels.TANH)

# Kernels count in int32, and blocks of columns in 16 bits.
LARGEST, MOST_COLUMNS = 1 << 28, 1 << 20


@dataclass(frozen=True, slots=True)
class Halves:
    """What tensor cores multiply in place of a float32 matrix.

    Attributes:
        rows, columns: of the matrix.
        high, low: both halves, filled up, times the scale; the second None where it is not wanted.
        unscale: what undoes the scale [1].
        bound: of the matrix [1], an int32; None where it is not known.
    """

    rows: int
    columns: int
    high: Tensor
    low: Tensor | None
    unscale: Tensor
    bound: Tensor | None


@dataclass(frozen=True, slots=True)
class Product:
    """abᵀ + bias + added, with a [M, K] and b [N, K].

    Attributes:
        a: [M, K], or [K, M] if its rows are not along k.
        b: [N, K], or [K, N] likewise.
        a_along: whether rows of a are along k.
        b_along: whether rows of b are.
        three: whether to have the digits of float32, rather than of tf32.
        bias: [N].
        added: [M, N], without gaps.
        bound_added: of that [1].
    """

    a: Halves
    b: Halves
    a_along: bool
    b_along: bool
    three: bool
    bias: Tensor | None = None
    added: Tensor | None = None
    bound_added: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K."""
        m, k = (self.a.rows, self.a.columns) if self.a_along else (self.a.columns, self.a.rows)
        return m, self.b.rows if self.b_along else self.b.columns, k

    @property
    def bounded(self) -> bool:
        """Whether a bound of the result is known before it is made."""
        return self.bias is None and self.a.bound is not None and self.b.bound is not None


@dataclass(frozen=True, slots=True)
class Function:
    """What is made of a product: a kind in `kernels`, and for `MULTIPLE` the factors.

    Attributes:
        kind: of the function.
        y: the matrix [M, N] that factors depend on, without gaps.
        bound_y: of the factors, but for the steepest; [1].
        multiple: the factor for y is the first, plus the second times y, plus the third times y².
        if_positive: whether it is zero where y is not positive.
        steepest: the largest factor, relative to the bound.
    """

    kind: int
    y: Tensor | None = None
    bound_y: Tensor | None = None
    multiple: tuple[float, float, float] = (0.0, 1.0, 0.0)
    if_positive: bool = False
    steepest: float = 1.0


def find_bound(x: Tensor, bound: Tensor) -> None:
    """Raise the bound [1], an int32, to the largest absolute value of a matrix."""
    rows, columns = x.shape
    unit, grid, sizes = _blocks(x, rows, columns)
    args = (x, bound, rows, columns // unit, x.stride(0) // unit)
    launch(kernels.find_bound, grid, args, (unit, *sizes))


def split(
    x: Tensor,
    bound: Tensor,
    kind: int = kernels.NOTHING,
    y: Tensor | None = None,
    out: Tensor | None = None,
    *,
    three: bool = True,
) -> Halves:
    """The halves of a matrix [rows, columns], or of a function of it.

    Args:
        x: rows may have gaps between them.
        bound: of x and of the function [1].
        kind: of the function, one of those in `kernels`.
        y: its second argument, without gaps.
        out: for its values, without gaps.
        three: whether both halves are wanted.
    """
    rows, columns = x.shape
    found = empty_halves(x, rows, columns, three=three, bound=bound)
    padded, width = found.high.shape
    unit, grid, sizes = _blocks(x, padded, width)
    args = (
        x,
        or_else(y, x),
        or_else(out, x),
        *pointers(found),
        found.unscale,
        bound,
        rows,
        columns // unit,
        x.stride(0) // unit,
        width,
        padded,
        int(three),
    )
    launch(kernels.split, grid, args, (kind, unit, *sizes))
    return found


def square(x: Halves, bound: Tensor) -> Halves:
    """The squares of a matrix, with the digits of its first half, and one half of their own."""
    found = empty_halves(x.unscale, x.rows, x.columns, three=False, bound=None)
    args = x.high, x.unscale, bound, found.high, found.unscale, x.high.numel()
    launch(kernels.square, (-(-x.high.numel() // BLOCK), 1), args, (BLOCK,))
    return found


def product(what: Product, *, bound: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """A float32 matrix [M, N].

    Args:
        what: to compute; nothing is added.
        bound: of the result [1], which is zero at first.
        out: for the result, without gaps between rows; a new matrix where not given.
    """
    m, n, k = what.sizes
    shape, shares = _shape(m, n, k, three=what.three, places=_places(what))
    shares = shares if what.bias is None and bound is None else 1
    out = what.b.unscale.new_empty(m, n) if out is None else out
    parts = out if shares == 1 else out.new_empty(shares, m, n)
    _multiply(what, kernels.NOTHING, parts, shape, shares, bound=bound)
    if shares > 1:
        size = out.numel()
        launch(kernels.add_up, (-(-size // SHORT), 1), (parts, out, size, shares), (SHORT,))
    return out


def function_of_product(
    what: Product, function: Function, out: Tensor, bound: Tensor | None = None
) -> Halves:
    """The halves of a function of a product, by the kernel that makes it.

    Args:
        what: the product; bounded, unless the function is.
        function: of it.
        out: for its values [M, N], without gaps.
        bound: for theirs [1], which is zero at first.
    """
    m, n, k = what.sizes
    shape, _ = _shape(m, n, k, three=what.three, places=_places(what))
    if not what.three:  # more registers than a product alone, so smaller tiles are faster
        shape = WIDE if shape == LARGE else SMALL
    found = empty_halves(out, m, n, three=what.three, bound=bound)
    kind = function.kind
    if kind == kernels.MULTIPLE and what.added is not None:
        kind = kernels.ADDED_MULTIPLE
    _multiply(what, kind, out, shape, 1, bound=bound, function=function, found=found)
    return found


def _multiply(
    what: Product,
    kind: int,
    out: Tensor,
    shape: tuple[int, int, int, int, int],
    shares: int,
    *,
    bound: Tensor | None,
    function: Function | None = None,
    found: Halves | None = None,
) -> None:
    """Launch the kernel of a product, in so many shares of the sum; the rest see there."""
    (m, n, k), a, b = what.sizes, what.a, what.b
    rows, columns, depth, warps, stages = shape
    depth_in_all = filled_up(k)
    any_bound = a.unscale.view(torch.int32)
    unit = 4 if n % 4 == 0 and kind >= kernels.MULTIPLE else 1
    of = function or Function(kind)
    args = (
        *pointers(a),
        *pointers(b),
        a.unscale,
        b.unscale,
        or_else(a.bound, any_bound),
        or_else(b.bound, any_bound),
        or_else(what.bias, out),
        or_else(what.added, a.unscale),
        or_else(what.bound_added, any_bound),
        or_else(of.y, a.unscale),
        or_else(of.bound_y, any_bound),
        or_else(bound, any_bound),
        out,
        a.unscale if found is None else out,
        *pointers(found or a),
        out if found is None else found.unscale,
        m,
        n // unit,
        depth_in_all,
        a.high.shape[1],
        b.high.shape[1],
        *reversed((found or a).high.shape),
        -(-depth_in_all // shares // depth) * depth,
        of.steepest * k,
        *of.multiple,
        int(of.if_positive),
        int(what.bias is not None),
        int(bound is not None),
        int(what.three),
    )
    grid = -(-m // rows) * -(-n // columns), shares
    constants = kind, unit, what.a_along, what.b_along, what.three, rows, columns, depth
    launch(kernels.product, grid, args, constants, num_warps=warps, num_stages=stages)


def empty_halves(
    like: Tensor, rows: int, columns: int, *, three: bool, bound: Tensor | None
) -> Halves:
    """Room for those of a matrix, on the device of a tensor."""
    planes = like.new_empty(
        1 + three, filled_up(rows), filled_up(columns), dtype=torch.half
    ).unbind()
    low = planes[1] if three else None
    return Halves(rows, columns, planes[0], low, like.new_empty(1), bound)


def pointers(halves: Halves) -> tuple[Tensor, Tensor]:
    """Both, or one of them twice."""
    return halves.high, or_else(halves.low, halves.high)


def fits(rows: Tensor) -> bool:
    """Whether a matrix that lies in memory row by row is none too large for the kernels."""
    count, columns = rows.shape
    return (
        filled_up(count) * filled_up(columns) <= LARGEST
        and count * rows.stride(0) <= LARGEST
        and columns <= MOST_COLUMNS
    )


def filled_up(count: int) -> int:
    """Rows or columns of halves, for so many of a matrix."""
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


def _places(what: Product) -> int:
    return multiprocessors(what.b.high.get_device())
