"""The kernels of `halves`, in Triton's language.

A bound is the largest absolute value of the finite numbers of a matrix, or more, kept as the bits
of a float32: for numbers that are not negative these are in the order of the numbers.

Triton compiles a kernel once for each choice of its capital arguments, and of what it is told to
know of the others: whether numbers are multiples of 16, and where memory begins. It is told to know
little, since each of these takes a part of a second the first time.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# A matrix is scaled so that its bound is below 2¹⁵, where fp16 has its digits: of numbers that are
# 2⁻²⁸ of the bound or more it keeps 11, and two of it keep 22 of those that are 2⁻¹⁷ or more.
TOP, INFINITE = tl.constexpr(14), tl.constexpr(0x7F800000)
NOTHING, SQUARE, SIGMOID, TANH, RELU, SIGMOID_BACKWARD, TANH_BACKWARD, RELU_BACKWARD = range(8)
_NOTHING, _SQUARE = tl.constexpr(NOTHING), tl.constexpr(SQUARE)
_SIGMOID, _TANH, _RELU = tl.constexpr(SIGMOID), tl.constexpr(TANH), tl.constexpr(RELU)
_SIGMOID_BACKWARD = tl.constexpr(SIGMOID_BACKWARD)
_TANH_BACKWARD, _RELU_BACKWARD = tl.constexpr(TANH_BACKWARD), tl.constexpr(RELU_BACKWARD)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(x):
    """As bits. What is not finite is left out, so that the other rows of a product keep theirs."""
    bits = _bits(x)
    return tl.max(tl.max(tl.where(bits < INFINITE, bits, 0), 1), 0)


@triton.jit(do_not_specialize=["rows", "units", "stride"], do_not_specialize_on_alignment=["bound"])
def find_bound(x, bound, rows, units, stride, UNIT: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """bound = max(bound, |x|) for x [rows, units · UNIT], whose rows are stride · UNIT apart."""
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    inside = (r < rows) & (c < units * UNIT)
    numbers = tl.load(x + r * (stride * UNIT) + c, inside, 0.0)
    tl.atomic_max(bound, _largest(numbers), sem="relaxed")


@triton.jit(
    do_not_specialize=["rows", "units", "stride", "padded"],
    do_not_specialize_on_alignment=["unscale", "bound", "other_bound"],
)
def split(
    x,
    y,
    out,
    high,
    low,
    unscale,
    bound,
    other_bound,
    rows,
    units,
    stride,
    width,
    padded,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """high + low = f(x, y) · scale [padded, width], zero outside of x [rows, units · UNIT].

    y and out, which gets f(x, y) itself, are like x without gaps between rows.
    """
    top = tl.load(bound).to(tl.float32, bitcast=True)
    top += tl.load(other_bound).to(tl.float32, bitcast=True)
    if KIND == _SQUARE:
        top *= top
    exponent = tl.minimum(254 + TOP - (_bits(top) >> 23), 253)  # so that 1 / scale is no denormal
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    r = tl.program_id(0) * R + tl.arange(0, R)[:, None]
    c = tl.program_id(1) * C + tl.arange(0, C)[None, :]
    cols = units * UNIT
    inside = (r < rows) & (c < cols)
    v = tl.load(x + r * (stride * UNIT) + c, inside, 0.0)
    at = r * cols + c
    if KIND == _SQUARE:
        v = v * v
    elif KIND == _SIGMOID:
        v = 1 / (1 + tl.exp(-v))
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
    v = v * scale
    h = v.to(tl.float16)
    place = r * width + c
    written = (r < padded) & (c < width)
    tl.store(high + place, h, written)
    rest = tl.where(_bits(v) < INFINITE, v - h.to(tl.float32), 0.0)
    tl.store(low + place, rest.to(tl.float16), written)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(unscale, 1 / scale)


@triton.jit(do_not_specialize=["size"])
def cross_entropy(x, target, out, size, BLOCK: tl.constexpr):
    """out [size] = -target log σ(x) - (1 - target) log σ(-x)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + at, at < size, 0.0)
    rest = libdevice.log1p(tl.exp(-tl.abs(z)))
    # Written so that NaN stays NaN.
    entropy = tl.where(z < 0, 0.0, z) - z * tl.load(target + at, at < size, 0.0) + rest
    tl.store(out + at, entropy, at < size)


@triton.jit(do_not_specialize=["size", "count"], do_not_specialize_on_alignment=["parts", "out"])
def add_up(parts, out, size, count, BLOCK: tl.constexpr):
    """out [size] = Σ parts [count, size]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        total += tl.load(parts + part * size + at, at < size, 0.0)
    tl.store(out + at, total, at < size)


@triton.jit(
    do_not_specialize=["size", "count", "stride", "sign"],
    do_not_specialize_on_alignment=["rows", "coefficients", "start", "out"],
)
def combine(rows, coefficients, start, out, size, count, stride, sign, BLOCK: tl.constexpr):
    """out [size] = start + sign · Σ_k coefficients[k] rows[k, :]; if sign is 0, the sum alone."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    row = rows + at
    for k in range(count):
        total += tl.load(coefficients + k) * tl.load(row, inside, 0.0)
        row += stride
    if sign != 0:
        total = tl.load(start + at, inside, 0.0) + sign * total
    tl.store(out + at, total, inside)


@triton.jit(
    do_not_specialize=["M", "N", "with_bias", "with_bound"],
    do_not_specialize_on_alignment=["bias", "bound", "unscale_a", "unscale_b", "out"],
)
def product(
    high_a,
    low_a,
    high_b,
    low_b,
    unscale_a,
    unscale_b,
    bias,
    bound,
    out,
    M,
    N,
    K,
    lda,
    ldb,
    share,
    with_bias,
    with_bound,
    A_ALONG: tl.constexpr,
    B_ALONG: tl.constexpr,
    THREE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out [M, N] = Σ_k a[m, k] b[n, k] + bias[n], and its bound; of a share of k for each axis 1.

    Memory has k along the rows of a matrix where it is ALONG, and along its columns elsewhere.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
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
        if THREE:
            rest_a = tl.load(low_a + this_a, valid_a, 0.0)
            rest_b = tl.load(low_b + this_b, valid_b, 0.0)
            # Tensor cores do not round their sums but cut them off, so these are kept short.
            some = tl.dot(rest_a, b)
            some = tl.dot(a, rest_b, some)
            total += tl.dot(a, b, some)
        else:
            total = tl.dot(a, b, total)
    one, other = tl.load(unscale_a), tl.load(unscale_b)
    total = (
        total * tl.minimum(one, other) * tl.maximum(one, other)
    )  # so as not to overflow on the way
    if with_bias:
        total += tl.load(bias + n, n < N, 0.0)[None, :]
    if with_bound:
        tl.atomic_max(bound, _largest(total), sem="relaxed")
    place = part * M * N + m[:, None] * N + n[None, :]
    tl.store(out + place, total, (m[:, None] < M) & (n[None, :] < N))
