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

from krylov_descent.messages import first_line
from krylov_descent.tensor_cores import kernels

# Tiles of the result, how much of the sum at a time, warps, stages of the pipeline.
SMALL, WIDE, LARGE = (64, 64, 64, 4, 3), (64, 128, 64, 4, 3), (128, 128, 64, 8, 3)
# Rows and columns of halves are filled up with zeros to multiples of this.
EVEN = 16
# What is gone through number by number is so in blocks of this many of them; short ones where each
# number of the result is made of several.
BLOCK, SHORT = 2048, 512
# Rows and columns of a basis that are multiplied with a vector at a time.
SPAN = (8, 1024)
# Rows and columns of a matrix whose rows are summed up at a time.
STRIP = (32, 128)
# The most parts that these are done in, and how many sums of so many are made at a time.
PARTS, FEW = 512, 8
# So many numbers of a row are summed up side by side.
ROW = 1024
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
    _launch(kernels.find_bound, grid, args, (unit, *sizes))


def split(
    x: Tensor,
    bound: Tensor,
    kind: int = kernels.NOTHING,
    y: Tensor | None = None,
    out: Tensor | None = None,
    *,
    three: bool = True,
    factors: tuple[Tensor, Tensor] | None = None,
) -> Halves:
    """The halves of a matrix [rows, columns], or of a function of it.

    Args:
        x: rows may have gaps between them.
        bound: of x and of the function [1]; of the derivative of a cross entropy that of y.
        kind: of the function, one of those in `kernels`.
        y: its second argument, without gaps.
        out: for its values, without gaps.
        three: whether both halves are wanted.
        factors: of the derivative of a cross entropy [rows], and their bound.
    """
    rows, columns = x.shape
    own = torch.empty_like(bound) if kind == kernels.ENTROPY_BACKWARD else bound
    found = _empty_halves(x, rows, columns, three, own)
    padded, width = found.high.shape
    unit, grid, sizes = _blocks(x, padded, width)
    args = (
        x,
        x if y is None else y,
        x if factors is None else factors[0],
        x if out is None else out,
        *_pointers(found),
        found.unscale,
        bound,
        bound if factors is None else factors[1],
        own,
        rows,
        columns // unit,
        x.stride(0) // unit,
        width,
        padded,
        int(three),
    )
    _launch(kernels.split, grid, args, (kind, unit, *sizes))
    return found


def square(x: Halves, bound: Tensor) -> Halves:
    """The squares of a matrix, with the digits of its first half, and one half of their own."""
    found = _empty_halves(x.unscale, x.rows, x.columns, False, None)
    args = x.high, x.unscale, bound, found.high, found.unscale, x.high.numel()
    _launch(kernels.square, (-(-x.high.numel() // BLOCK), 1), args, (BLOCK,))
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
    out = what.a.unscale.new_empty(m, n) if out is None else out
    parts = out if shares == 1 else out.new_empty(shares, m, n)
    _multiply(what, kernels.NOTHING, parts, shape, shares, bound=bound)
    if shares > 1:
        size = out.numel()
        _launch(kernels.add_up, (-(-size // SHORT), 1), (parts, out, size, shares), (SHORT,))
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
    if not what.three:
        shape = WIDE if shape == LARGE else SMALL
    found = _empty_halves(out, m, n, what.three, bound)
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
    depth_in_all = _filled_up(k)
    any_bound = a.unscale.view(torch.int32)
    unit = 4 if n % 4 == 0 and kind >= kernels.MULTIPLE else 1
    of = function or Function(kind)
    args = (
        *_pointers(a),
        *_pointers(b),
        a.unscale,
        b.unscale,
        _or(a.bound, any_bound),
        _or(b.bound, any_bound),
        _or(what.bias, out),
        _or(what.added, a.unscale),
        _or(what.bound_added, any_bound),
        _or(of.y, a.unscale),
        _or(of.bound_y, any_bound),
        _or(bound, any_bound),
        out,
        a.unscale if found is None else out,
        *_pointers(found or a),
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
    _launch(kernels.product, grid, args, constants, num_warps=warps, num_stages=stages)


def _empty_halves(
    like: Tensor, rows: int, columns: int, three: bool, bound: Tensor | None
) -> Halves:
    planes = like.new_empty(
        1 + three, _filled_up(rows), _filled_up(columns), dtype=torch.half
    ).unbind()
    low = planes[1] if three else None
    return Halves(rows, columns, planes[0], low, like.new_empty(1), bound)


def _pointers(halves: Halves) -> tuple[Tensor, Tensor]:
    return halves.high, _or(halves.low, halves.high)


def _or(given: Tensor | None, other: Tensor) -> Tensor:
    """For an argument that a kernel does not look at: any of its kind."""
    return other if given is None else given


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
    args = rows, coefficients, _or(start, out), out, size, count, rows.stride(0), used
    _launch(kernels.combine, (-(-size // SHORT), 1), args, (SHORT,))
    return out


def scale_and_add(x: Tensor, scale: Tensor, other: Tensor, factor: float) -> None:
    """x · scale + factor · other in place of x [n], for a scale on the GPU."""
    args = x, scale, other, x.numel(), factor
    _launch(kernels.scale_and_add, (-(-x.numel() // SHORT), 1), args, (SHORT,))


def scale_of_length(squared: Tensor, least: float, before: Tensor, place: Tensor) -> Tensor:
    """1 / √squared, and the square at its place; zero where it is not above least · before."""
    scale = torch.empty_like(squared)
    _launch(kernels.scale_of_length, (1, 1), (squared, before, place, scale, least), ())
    return scale


def project(rows: Tensor, vector: Tensor) -> Tensor:
    """Σ_c rows[k, c] vector[c] for each row [count].

    Args:
        rows: [count, n], which may have gaps between them.
        vector: [n].
    """
    count, size = rows.shape
    programs = min(2 * _multiprocessors(rows.get_device()), PARTS)
    span = -(-size // programs // SPAN[1]) * SPAN[1]
    programs = -(-size // span)
    parts, out = rows.new_empty(programs, count), rows.new_empty(count)
    args = rows, vector, parts, size, count, rows.stride(0), span
    _launch(kernels.project, (programs, 1), args, SPAN, num_warps=8)
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
    most = max(1, min(2 * _multiprocessors(x.get_device()) // blocks, PARTS))
    span = -(-rows // most // deep) * deep
    programs = -(-rows // span)
    parts = out if programs == 1 else x.new_empty(programs, width)
    args = x, parts, rows, columns, span
    _launch(kernels.sum_columns, (blocks, programs), args, (squares, deep, wide))
    if programs > 1:
        _add_up_parts(parts, out)
    return out


def _add_up_parts(parts: Tensor, out: Tensor) -> None:
    """out [count] = Σ parts [programs, count]."""
    programs, count = parts.shape
    most = 1 << (programs - 1).bit_length()
    few = FEW * PARTS // most
    args = parts, out, programs, count
    _launch(kernels.add_up_parts, (-(-count // few), 1), args, (most, few))


def move(source: Tensor, target: Tensor) -> None:
    """Copy a few numbers; one of both is in the host's memory, and pinned."""
    _launch(kernels.move, (1, 1), (source, target, source.numel()), (ROW,))


def cross_entropy(x: Tensor, target: Tensor, bound: Tensor) -> Tensor:
    """Of each row [rows, columns], between the sigmoid and a target; both without gaps.

    Args:
        x: before the sigmoid.
        target: like it.
        bound: to be raised to that of the targets [1].
    """
    rows, columns = x.shape
    out = x.new_empty(rows)
    _launch(kernels.cross_entropy, (rows, 1), (x, target, out, bound, columns), (ROW,))
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
    where = max(tensor.get_device() for tensor in tensors)  # one may be in the host's memory
    dtype = tensors[0].dtype
    kind = (kernel.__name__, where, dtype, *constants, *options.values(), *aligned)
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


def _places(what: Product) -> int:
    return _multiprocessors(what.a.high.get_device())


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
