"""A float32 matrix as the sum of two in fp16, and products of such matrices on tensor cores.

x = (x₁ + x₂) / s, where the scale s is a power of two that the GPU finds by itself. Then
abᵀ = (a₁b₁ᵀ + a₁b₂ᵀ + a₂b₁ᵀ) / st, but for what is smaller than a float32 has digits: three
products, which together take a third of the time of one in float32. The first of them alone has the
digits of tf32, in less time.

The bound of a matrix is its largest absolute value, or more: an int32 [1] with the bits of a
float32. The same by torch: `mm`, `addmm`, and the functions themselves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton.launching import SHORT, launch, multiprocessors, or_else

# Rows and columns of a tile of the result, terms of the sum at a time, warps, pipeline stages.
SMALL, WIDE, LARGE = (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3)
# Rows and columns of a split are filled up with zeros to multiples of this.
EVEN = 16
# Numbers of a block, where a kernel goes through a matrix number by number; and the columns of a
# block, where the matrix has no more of them.
BLOCK, NARROW = 2048, 64
# Functions whose values are between -1 and 1.
BOUNDED_BY_ONE = (kernels.SIGMOID, kernels.TANH)
# Kernels count in int32, and blocks of columns in 16 bits.
LARGEST, MOST_COLUMNS = 1 << 28, 1 << 20


@dataclass(frozen=True, slots=True)
class SplitMatrix:
    """A float32 matrix in two parts of fp16.

    Attributes:
        rows, columns: of the matrix.
        high, low: both parts, filled up, times the scale; the second None where not wanted.
        unscale: 1 / scale [1].
        bound: of the matrix; None where not known.
    """

    rows: int
    columns: int
    high: Tensor
    low: Tensor | None
    unscale: Tensor
    bound: Tensor | None

    @classmethod
    def empty(
        cls, like: Tensor, rows: int, columns: int, *, exact: bool, bound: Tensor | None
    ) -> "SplitMatrix":
        """Room for one on the device of a tensor, with both parts if it is to be exact."""
        shape = 1 + exact, filled_up(rows), filled_up(columns)
        parts = like.new_empty(shape, dtype=torch.half).unbind()
        low = parts[1] if exact else None
        return cls(rows, columns, parts[0], low, like.new_empty(1), bound)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Both, or one of them twice."""
        return self.high, or_else(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Product:
    """abᵀ + bias + added, with a [M, K] and b [N, K].

    Attributes:
        a: [M, K], or [K, M] if its rows are not along k.
        b: [N, K], or [K, N] likewise.
        a_along, b_along: whether rows are along k.
        exact: whether to have the digits of float32, rather than of tf32.
        bias: [N].
        added: [M, N], without gaps.
        bound_added: of that.
    """

    a: SplitMatrix
    b: SplitMatrix
    a_along: bool
    b_along: bool
    exact: bool
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
        """Whether a bound of the result is known before it is computed."""
        return self.bias is None and self.a.bound is not None and self.b.bound is not None


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a product.

    Attributes:
        kind: one of those in `kernels`: SIGMOID, TANH, or MULTIPLE, a factor for each number.
        y: the matrix [M, N] that the factors depend on, without gaps.
        bound_y: of the factors, relative to the steepest.
        multiple: the factor is the first of these, plus the second times y, plus the third times
            y².
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
    """Raise a bound to the largest absolute value of a matrix, whose rows may have gaps."""
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
    exact: bool = True,
) -> SplitMatrix:
    """The split of a matrix, or of a function of it.

    Args:
        x: [rows, columns]; rows may have gaps between them.
        bound: of x and of the function.
        kind: of the function, one of those in `kernels`.
        y: its second argument, without gaps.
        out: for its values, without gaps.
        exact: whether both parts are wanted.
    """
    rows, columns = x.shape
    found = SplitMatrix.empty(x, rows, columns, exact=exact, bound=bound)
    padded, width = found.high.shape
    unit, grid, sizes = _blocks(x, padded, width)
    tensors = x, or_else(y, x), or_else(out, x), *found.parts, found.unscale, bound
    numbers = rows, columns // unit, x.stride(0) // unit, width, padded, int(exact)
    launch(kernels.split, grid, (*tensors, *numbers), (kind, unit, *sizes))
    return found


def square(x: SplitMatrix, bound: Tensor) -> SplitMatrix:
    """The squares of a matrix, with the digits of its first part, and one part of their own."""
    found = SplitMatrix.empty(x.unscale, x.rows, x.columns, exact=False, bound=None)
    args = x.high, x.unscale, bound, found.high, found.unscale, x.high.numel()
    launch(kernels.square, (-(-x.high.numel() // BLOCK), 1), args, (BLOCK,))
    return found


def product(what: Product, *, bound: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """A float32 matrix [M, N].

    Args:
        what: to compute; nothing is added.
        bound: for that of the result, which is zero at first.
        out: for the result, without gaps between rows; a new matrix where not given.
    """
    m, n, _ = what.sizes
    shape, shares = _shape(what)
    shares = shares if what.bias is None and bound is None else 1
    out = what.b.unscale.new_empty(m, n) if out is None else out
    parts = out if shares == 1 else out.new_empty(shares, m, n)
    _multiply(what, Function(kernels.NOTHING), parts, shape, shares, bound=bound)
    if shares > 1:
        size = out.numel()
        launch(kernels.add_up, (-(-size // SHORT), 1), (parts, out, size, shares), (SHORT,))
    return out


def function_of_product(
    what: Product, function: Function, out: Tensor, bound: Tensor | None = None
) -> SplitMatrix:
    """The split of a function of a product, by the kernel that computes it.

    Args:
        what: the product; bounded, unless the function is.
        function: of it.
        out: for its values [M, N], without gaps.
        bound: for theirs, which is zero at first.
    """
    m, n, _ = what.sizes
    shape, _ = _shape(what)
    if not what.exact:  # more registers than a product alone, so smaller tiles are faster
        shape = WIDE if shape == LARGE else SMALL
    found = SplitMatrix.empty(out, m, n, exact=what.exact, bound=bound)
    _multiply(what, function, out, shape, 1, bound=bound, found=found)
    return found


def _multiply(
    what: Product,
    function: Function,
    out: Tensor,
    shape: tuple[int, int, int, int, int],
    shares: int,
    *,
    bound: Tensor | None,
    found: SplitMatrix | None = None,
) -> None:
    """Launch the kernel of a product, in so many shares of the sum; the rest see there."""
    (m, n, k), a, b, kind = what.sizes, what.a, what.b, function.kind
    if kind == kernels.MULTIPLE and what.added is not None:
        kind = kernels.ADDED_MULTIPLE
    rows, columns, depth, warps, stages = shape
    depth_in_all = filled_up(k)
    any_bound = a.unscale.view(torch.int32)
    unit = 4 if n % 4 == 0 and kind >= kernels.MULTIPLE else 1
    args = (
        *a.parts,
        *b.parts,
        a.unscale,
        b.unscale,
        or_else(a.bound, any_bound),
        or_else(b.bound, any_bound),
        or_else(what.bias, out),
        or_else(what.added, a.unscale),
        or_else(what.bound_added, any_bound),
        or_else(function.y, a.unscale),
        or_else(function.bound_y, any_bound),
        or_else(bound, any_bound),
        out,
        a.unscale if found is None else out,
        *(found or a).parts,
        out if found is None else found.unscale,
        m,
        n // unit,
        depth_in_all,
        a.high.shape[1],
        b.high.shape[1],
        *reversed((found or a).high.shape),
        -(-depth_in_all // shares // depth) * depth,
        function.steepest * k,
        *function.multiple,
        int(function.if_positive),
        int(what.bias is not None),
        int(bound is not None),
        int(what.exact),
    )
    grid = -(-m // rows) * -(-n // columns), shares
    constants = kind, unit, what.a_along, what.b_along, what.exact, rows, columns, depth
    launch(kernels.product, grid, args, constants, num_warps=warps, num_stages=stages)


def is_plain(x: Tensor, device: torch.device) -> bool:
    """Whether it is a dense float32 tensor on this device."""
    return x.dtype is torch.float32 and x.layout is torch.strided and x.device == device


def is_rows(x: Tensor, device: torch.device) -> bool:
    """Whether it is plain and lies in memory row by row, without gaps; no images."""
    return is_plain(x, device) and x.dim() in (2, 3) and x.shape[-1] > 1 and x.is_contiguous()


def rows_of(x: Tensor) -> Tensor:
    """The matrix [rows, columns] that such a tensor is in memory."""
    return x.view(-1, x.shape[-1])


def fits(rows: Tensor) -> bool:
    """Whether a matrix that lies in memory row by row is none too large for the kernels."""
    count, columns = rows.shape
    padded = filled_up(count) * filled_up(columns)
    return max(padded, count * rows.stride(0)) <= LARGEST and columns <= MOST_COLUMNS


def filled_up(count: int) -> int:
    """Rows or columns of a split, for so many of a matrix."""
    return -(-count // EVEN) * EVEN


def _blocks(x: Tensor, rows: int, columns: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """How many numbers of a row can be read at once, the number of blocks, and their sizes."""
    wide = columns > NARROW
    c = 4 * NARROW if wide else NARROW
    even = x.data_ptr() % 16 == 0 and x.stride(0) % 4 == 0 and x.shape[1] % 4 == 0
    return 4 if wide and even else 1, (-(-rows * c // BLOCK), -(-columns // c)), (BLOCK // c, c)


def _shape(what: Product) -> tuple[tuple[int, int, int, int, int], int]:
    """Of the tiles, and into how many shares to divide the sum so that there are enough of them."""
    (m, n, k), places = what.sizes, multiprocessors(what.b.high.get_device())
    # Measured on an H200. A multiprocessor has a large tile at a time, or two small ones; of three
    # products a large tile takes 1.7 times as long as two small ones.
    small, large = -(-m // 64) * -(-n // 64), -(-m // 128) * -(-n // 128)
    if what.exact:
        shape = LARGE if 1.7 * -(-large // places) <= -(-small // (2 * places)) else SMALL
    else:
        shape = LARGE if large >= 4 * places else WIDE if small >= 2 * places else SMALL
    if k >= 8192 and large >= 8:
        shape = LARGE
    tiles = -(-m // shape[0]) * -(-n // shape[1])
    return shape, max(1, min(2 * places // tiles, k // 256))
