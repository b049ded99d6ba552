"""The Triton kernels of `split_fp16` and `cross_entropy`.

A bound is an upper bound of the absolute values of a matrix's finite entries, stored as the bits of
a float32. The bits of non-negative floats are ordered like the floats.

Triton specialises a kernel on its constexpr arguments (in capitals), on the divisibility of its
integers by 16, and on the alignment of its pointers. Each compilation takes a part of a second, so
most integers and pointers are excluded.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from krylov_descent.runtime.private import fix_cache_keys

# A matrix is scaled so that its bound is below 2¹⁵, within the range of fp16. One fp16 part keeps
# 11 bits of entries from 2⁻²⁸ of the bound on; two parts keep 22 bits of entries from 2⁻¹⁷ on.
TOP, ONE, INFINITE = tl.constexpr(14), tl.constexpr(0x3F800000), tl.constexpr(0x7F800000)
# Functions f(x), and their backward functions of the cotangent x and the value y of the function.
NOTHING, SIGMOID, TANH, RELU, SIGMOID_BACKWARD, TANH_BACKWARD, RELU_BACKWARD = range(7)
# Further functions of a product: the product (ADDED: plus a matrix) times the entrywise factor
# first + second · y + third · y² of a matrix y, optionally zero where y ≤ 0. Each function is a
# specialisation of its own, since a kernel for all would need too many registers.
MULTIPLE, ADDED_MULTIPLE = 8, 9
_NOTHING, _SIGMOID = tl.constexpr(NOTHING), tl.constexpr(SIGMOID)
_TANH, _RELU = tl.constexpr(TANH), tl.constexpr(RELU)
_SIGMOID_BACKWARD = tl.constexpr(SIGMOID_BACKWARD)
_TANH_BACKWARD, _RELU_BACKWARD = tl.constexpr(TANH_BACKWARD), tl.constexpr(RELU_BACKWARD)
_MULTIPLE, _ADDED_MULTIPLE = tl.constexpr(MULTIPLE), tl.constexpr(ADDED_MULTIPLE)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(x):
    """The bits of the largest finite |x|. A row that is not finite must not spoil other rows."""
    bits = _bits(x)
    return tl.max(tl.max(tl.where(bits < INFINITE, bits, 0), 1), 0)


@triton.jit
def _scale(top):
    """The power of two that scales a matrix with this bound."""
    exponent = tl.minimum(254 + TOP - (_bits(top) >> 23), 253)  # so that 1 / scale is no denormal
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _number(bound):
    return tl.load(bound).to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _store_split(v, high, low, place, written, with_low):
    h = v.to(tl.float16)
    tl.store(high + place, h, written)
    if with_low:
        rest = tl.where(_bits(v) < INFINITE, v - h.to(tl.float32), 0.0)
        tl.store(low + place, rest.to(tl.float16), written)


fix_cache_keys([_bits, _largest, _scale, _number, _sigmoid, _store_split])


@triton.jit
def reset(bounds, BLOCK: tl.constexpr):
    """Set the first bound to 1, and all others to 0."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(bounds + at, tl.where(at == 0, ONE, 0))


@triton.jit(do_not_specialize=["rows", "units", "stride"], do_not_specialize_on_alignment=["bound"])
def find_bound(x, bound, rows, units, stride, UNIT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """bound = max(bound, max |x|) of x [rows, units · UNIT], with a row stride of stride · UNIT."""
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    inside = (r < rows) & (c < units * UNIT)
    numbers = tl.load(x + r * (stride * UNIT) + c, inside, 0.0)
    tl.atomic_max(bound, _largest(numbers), sem="relaxed")


@triton.jit(
    do_not_specialize=["rows", "units", "stride", "padded", "with_low"],
    do_not_specialize_on_alignment=["unscale", "bound"],
)
def split(
    x,
    y,
    out,
    high,
    low,
    unscale,
    bound,
    rows,
    units,
    stride,
    width,
    padded,
    with_low,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """high + low = f(x, y) · scale [padded, width], zero outside of x [rows, units · UNIT].

    y and out are contiguous in the shape of x; out = f(x, y). The bound holds for x and f(x, y).
    """
    scale = _scale(_number(bound))
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    cols = units * UNIT
    inside = (r < rows) & (c < cols)
    v = tl.load(x + r * (stride * UNIT) + c, inside, 0.0)
    at = r * cols + c
    if KIND == _SIGMOID:
        v = _sigmoid(v)
    elif KIND == _TANH:
        v = libdevice.tanh(v)
    elif KIND == _RELU:
        v = tl.where(v <= 0, 0.0, v)
    elif KIND == _SIGMOID_BACKWARD:
        result = tl.load(y + at, inside, 0.0)
        v = v * (1 - result) * result
    elif KIND == _TANH_BACKWARD:
        result = tl.load(y + at, inside, 0.0)
        v = v * (1 - result * result)
    elif KIND == _RELU_BACKWARD:
        v = tl.where(tl.load(y + at, inside, 0.0) <= 0, 0.0, v)
    v = tl.where(inside, v, 0.0)
    if KIND != _NOTHING:
        tl.store(out + at, v, inside)
    written = (r < padded) & (c < width)
    _store_split(v * scale, high, low, r * width + c, written, with_low)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(unscale, 1 / scale)


@triton.jit(do_not_specialize_on_alignment=["unscale", "bound", "new_unscale"])
def square(high, unscale, bound, squared, new_unscale, size, BLOCK: tl.constexpr):
    """squared = the high part of x² [size], from the high part and the bound of x."""
    top = _number(bound)
    scale = _scale(top * top)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(high + at, at < size, 0.0).to(tl.float32) * tl.load(unscale)
    tl.store(squared + at, (x * x * scale).to(tl.float16), at < size)
    if tl.program_id(0) == 0:
        tl.store(new_unscale, 1 / scale)


@triton.jit(do_not_specialize=["size", "count"], do_not_specialize_on_alignment=["parts", "out"])
def add_up(parts, out, size, count, BLOCK: tl.constexpr):
    """out [size] = Σ parts [count, size] over count."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        total += tl.load(parts + part * size + at, at < size, 0.0)
    tl.store(out + at, total, at < size)


@triton.jit(
    do_not_specialize=[
        *("M", "units", "padded", "largest", "first", "second", "third", "if_positive"),
        *("with_bias", "with_bound", "with_low"),
    ],
    do_not_specialize_on_alignment=[
        *("unscale_a", "unscale_b", "bound_a", "bound_b", "bound_added", "bound_y"),
        *("bias", "bound", "out", "unscale"),
    ],
)
def product(
    high_a,
    low_a,
    high_b,
    low_b,
    unscale_a,
    unscale_b,
    bound_a,
    bound_b,
    bias,
    added,
    bound_added,
    y,
    bound_y,
    bound,
    out,
    values,
    high,
    low,
    unscale,
    M,
    units,
    K,
    lda,
    ldb,
    width,
    padded,
    share,
    largest,
    first,
    second,
    third,
    if_positive,
    with_bias,
    with_bound,
    with_low,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    A_ALONG: tl.constexpr,
    B_ALONG: tl.constexpr,
    EXACT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out [M, N] = Σ_k a[m, k] b[n, k] + bias[n], and its bound; or a function's values and split.

    The function is f(Σ_k a[m, k] b[n, k] + bias[n] + added[m, n], y[m, n]). N is units · UNIT, and
    UNIT entries are loaded at once. Each program on axis 1 sums over a share of k. The rows of a
    run along k in memory if A_ALONG, else its columns; those of b if B_ALONG.

    The split is scaled before the largest result is known, by a bound: without `added`, results
    are at most `largest` times the bounds of a, b and y. As a rule that leaves 2⁷ to 2¹² of fp16's
    range unused.
    """
    tile, part, N = tl.program_id(0), tl.program_id(1), units * UNIT
    tiles_m = tl.cdiv(M, BM)
    m = (tile % tiles_m) * BM + tl.arange(0, BM)
    n = (tile // tiles_m) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    if A_ALONG:
        at_a, in_a, step_a = m[:, None] * lda + k[None, :], m[:, None] < M, 1
    else:
        at_a, in_a, step_a = k[None, :] * lda + m[:, None], m[:, None] < lda, lda
    if B_ALONG:
        at_b, in_b, step_b = n[None, :] * ldb + k[:, None], n[None, :] < N, 1
    else:
        at_b, in_b, step_b = k[:, None] * ldb + n[None, :], n[None, :] < ldb, ldb
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(part * share, min(K, (part + 1) * share), BK):
        this_a, this_b = at_a + start * step_a, at_b + start * step_b
        valid_a, valid_b = in_a & (k[None, :] < K - start), in_b & (k[:, None] < K - start)
        a = tl.load(high_a + this_a, valid_a, 0.0)
        b = tl.load(high_b + this_b, valid_b, 0.0)
        if EXACT:
            rest_a = tl.load(low_a + this_a, valid_a, 0.0)
            rest_b = tl.load(low_b + this_b, valid_b, 0.0)
            # Tensor cores truncate their sums instead of rounding, so these are kept short.
            some = tl.dot(rest_a, b)
            some = tl.dot(a, rest_b, some)
            total += tl.dot(a, b, some)
        else:
            total = tl.dot(a, b, total)
    one, other = tl.load(unscale_a), tl.load(unscale_b)
    # Multiply by the smaller factor first, to avoid overflow.
    total = total * tl.minimum(one, other) * tl.maximum(one, other)
    place = m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if KIND >= _MULTIPLE:
        if KIND == _ADDED_MULTIPLE:
            total += tl.load(added + place, inside, 0.0)
        number = tl.load(y + place, inside, 0.0)
        total *= first + number * (second + number * third)
        total = tl.where((if_positive != 0) & (number <= 0), 0.0, total)
    elif with_bias:
        total += tl.load(bias + n, n < N, 0.0)[None, :]
    if KIND == _SIGMOID:
        total = _sigmoid(total)
    elif KIND == _TANH:
        total = libdevice.tanh(total)
    if KIND != _NOTHING:
        total = tl.where(inside, total, 0.0)
        top = 1.0
        if KIND >= _MULTIPLE:
            top = _number(bound_a) * _number(bound_b) * largest
            if KIND == _ADDED_MULTIPLE:
                top += _number(bound_added)
            top *= _number(bound_y)
        scale = _scale(top)
        written = (m[:, None] < padded) & (n[None, :] < width)
        at = m[:, None] * width + n[None, :]
        _store_split(total * scale, high, low, at, written, with_low)
        if tile == 0:
            tl.store(unscale, 1 / scale)
        tl.store(values + place, total, inside)
    else:
        tl.store(out + part * M * N + place, total, inside)
    if with_bound:
        tl.atomic_max(bound, _largest(total), sem="relaxed")


@triton.jit(
    do_not_specialize=["rows", "units", "share", "with_low"],
    do_not_specialize_on_alignment=["losses", "unscale", "bound", "bound_of_target"],
)
def cross_entropy(
    x,
    target,
    losses,
    delta,
    high,
    low,
    unscale,
    bound,
    bound_of_target,
    rows,
    units,
    width,
    share,
    with_low,
    DELTA: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cross entropy of each row of x and target [rows, units · UNIT], and with DELTA delta.

    losses [rows] = share · Σ -target log σ(x) - (1 - target) log σ(-x).

    delta, in the shape of x, is the derivative of Σ losses: share · (σ(x) - target). Its split is
    high + low = delta · scale [programs, width], zero outside of x. Its bound, which sets the
    scale, is (1 + bound_of_target) · share.
    """
    row, cols = tl.program_id(0), units * UNIT
    is_row = row < rows
    if DELTA:
        top = (1 + _number(bound_of_target)) * share
        scale = _scale(top)
        if row == 0:
            tl.store(unscale, 1 / scale)
            tl.store(bound, _bits(top))
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        c = start + tl.arange(0, BLOCK)
        inside, at = is_row & (c < cols), row * cols + c
        z = tl.load(x + at, inside, 0.0)
        t = tl.load(target + at, inside, 0.0)
        smaller = tl.exp(-tl.abs(z))  # min(1, exp(z)) / max(1, exp(z))
        # `where` keeps NaN, unlike a maximum.
        entropy = tl.where(z < 0, 0.0, z) - z * t + libdevice.log1p(smaller)
        total += tl.where(inside, entropy, 0.0)
        if DELTA:
            sigmoid = tl.where(z < 0, smaller, 1.0) / (1 + smaller)
            v = tl.where(inside, (sigmoid - t) * share, 0.0)
            tl.store(delta + at, v, inside)
            _store_split(v * scale, high, low, row * width + c, c < width, with_low)
    tl.store(losses + row, share * tl.sum(total, 0), is_row)
