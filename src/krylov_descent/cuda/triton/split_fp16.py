"""Float32 matrices split into two fp16 matrices, and products of splits on tensor cores.

x = (x₁ + x₂) / s, where the scale s is a power of two that is found on the GPU. Up to the rounding
of float32, abᵀ = (a₁b₁ᵀ + a₁b₂ᵀ + a₂b₁ᵀ) / st. These three fp16 products together take a third of
the time of one in float32. The first of them alone has the precision of tf32 and takes less time.

The bound of a matrix is an upper bound of its absolute values: an int32 [1] with the bits of a
float32. The references in torch are `mm`, `addmm` and the functions themselves.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton.launching import SHORT, launch, multiprocessors, or_else

# Rows and columns of a tile of the result, terms of the sum per iteration, warps, pipeline stages.
SMALL, WIDE, LARGE = (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3)
# The rows and columns of a split are padded with zeros to multiples of this number.
EVEN = 16
# Entries of a block in entrywise kernels, and the columns of a block in matrices that have no more.
BLOCK, NARROW = 2048, 64
# Functions whose values are between -1 and 1.
BOUNDED_BY_ONE = (kernels.SIGMOID, kernels.TANH)
# Limits: kernels index entries by int32, and blocks of columns by 16 bits.
LARGEST, MOST_COLUMNS = 1 << 28, 1 << 20


@dataclass(frozen=True, slots=True)
class SplitMatrix:
    """A float32 matrix as the sum of two fp16 matrices.

    Attributes:
        rows, columns: shape of the matrix.
        high, low: both parts, padded, times the scale; low is None for the precision of tf32.
        unscale: 1 / scale [1].
        bound: bound of the matrix; None if not known.
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
        """An uninitialised split on the device of a tensor; with low if exact."""
        shape = 1 + exact, filled_up(rows), filled_up(columns)
        parts = like.new_empty(shape, dtype=torch.half).unbind()
        low = parts[1] if exact else None
        return cls(rows, columns, parts[0], low, like.new_empty(1), bound)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """high and low, or high twice if there is no low."""
        return self.high, or_else(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Product:
    """abᵀ + bias + added, with a [M, K] and b [N, K].

    Attributes:
        a: [M, K] if a_along, else [K, M].
        b: [N, K] if b_along, else [K, N].
        a_along, b_along: whether the rows of a and b run along k.
        exact: whether to compute in the precision of float32, rather than of tf32.
        bias: [N].
        added: [M, N], contiguous.
        bound_added: bound of `added`.
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
        """Whether the result has a bound before it is computed."""
        return self.bias is None and self.a.bound is not None and self.b.bound is not None


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a product.

    Attributes:
        kind: number of the function in `kernels`: SIGMOID, TANH, or MULTIPLE (entrywise factors).
        y: contiguous matrix [M, N] that the factors depend on.
        bound_y: the factors are at most steepest · bound_y.
        multiple: numbers (p, q, r) of the factor p + q·y + r·y².
        if_positive: whether the factor is zero where y ≤ 0.
        steepest: see bound_y.
    """

    kind: int
    y: Tensor | None = None
    bound_y: Tensor | None = None
    multiple: tuple[float, float, float] = (0.0, 1.0, 0.0)
    if_positive: bool = False
    steepest: float = 1.0


def find_bound(x: Tensor, bound: Tensor) -> None:
    """Raise a bound to the largest absolute value of x [rows, columns], with stride(1) = 1."""
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
        bound: bound of x and of the function.
        kind: number of the function in `kernels`.
        y: second argument of the function, contiguous.
        out: written with the function's values, contiguous.
        exact: whether to compute the low part too.
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
    """The split of x², without a low part, computed from the high part of x."""
    found = SplitMatrix.empty(x.unscale, x.rows, x.columns, exact=False, bound=None)
    args = x.high, x.unscale, bound, found.high, found.unscale, x.high.numel()
    launch(kernels.square, (-(-x.high.numel() // BLOCK), 1), args, (BLOCK,))
    return found


def product(what: Product, *, bound: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Compute a product as a float32 matrix [M, N].

    Args:
        what: the product, without `added`.
        bound: zero; raised to the bound of the result.
        out: contiguous matrix for the result; a new one by default.
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
    """The split of a function of a product, by one kernel for product and function.

    Args:
        what: the product; bounded, unless the function is.
        function: the function.
        out: contiguous matrix [M, N], written with the function's values.
        bound: zero; raised to the bound of the values.
    """
    m, n, _ = what.sizes
    shape, _ = _shape(what)
    if not what.exact:  # a function needs more registers, so smaller tiles are faster
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
    """Launch the kernel of a product, with the sum divided into shares."""
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
    """Whether x is a dense float32 tensor on this device."""
    return x.dtype is torch.float32 and x.layout is torch.strided and x.device == device


def is_rows(x: Tensor, device: torch.device) -> bool:
    """Whether x is plain, contiguous, of 2 or 3 dimensions, and has more than one column."""
    return is_plain(x, device) and x.dim() in (2, 3) and x.shape[-1] > 1 and x.is_contiguous()


def rows_of(x: Tensor) -> Tensor:
    """A tensor for which `is_rows` holds, as a matrix [rows, columns]."""
    return x.view(-1, x.shape[-1])


def fits(rows: Tensor) -> bool:
    """Whether a matrix that is stored row by row is small enough for the kernels."""
    count, columns = rows.shape
    padded = filled_up(count) * filled_up(columns)
    return max(padded, count * rows.stride(0)) <= LARGEST and columns <= MOST_COLUMNS


def filled_up(count: int) -> int:
    """The padded number of rows or columns of a split."""
    return -(-count // EVEN) * EVEN


def _blocks(x: Tensor, rows: int, columns: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """The width of vectorised loads, the number of blocks, and the shape of a block."""
    wide = columns > NARROW
    c = 4 * NARROW if wide else NARROW
    even = x.data_ptr() % 16 == 0 and x.stride(0) % 4 == 0 and x.shape[1] % 4 == 0
    return 4 if wide and even else 1, (-(-rows * c // BLOCK), -(-columns // c)), (BLOCK // c, c)


def _shape(what: Product) -> tuple[tuple[int, int, int, int, int], int]:
    """The tile, and the number of shares of the sum that gives enough programs."""
    (m, n, k), places = what.sizes, multiprocessors(what.b.high.get_device())
    # Measured on an H200. A multiprocessor runs one large tile or two small ones at a time. With
    # three fp16 products a large tile takes 1.7 times as long as two small ones.
    small, large = -(-m // 64) * -(-n // 64), -(-m // 128) * -(-n // 128)
    if what.exact:
        shape = LARGE if 1.7 * -(-large // places) <= -(-small // (2 * places)) else SMALL
    else:
        shape = LARGE if large >= 4 * places else WIDE if small >= 2 * places else SMALL
    if k >= 8192 and large >= 8:
        shape = LARGE
    tiles = -(-m // shape[0]) * -(-n // shape[1])
    return shape, max(1, min(2 * places // tiles, k // 256))
