"""The kernels of `vectors`, in Triton's language."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from krylov_descent.tensor_cores.kernels import INFINITE, _bits


@triton.jit(
    do_not_specialize=["rows", "columns", "span"], do_not_specialize_on_alignment=["x", "parts"]
)
def sum_columns(
    x, parts, rows, columns, span, SQUARES: tl.constexpr, R: tl.constexpr, C: tl.constexpr
):
    """parts [programs, columns] = Σ x[r, c] over a span of rows each; and behind it Σ x[r, c]²."""
    begin = tl.program_id(1) * span
    end = tl.minimum(begin + span, rows)
    r, c = tl.arange(0, R)[:, None], tl.program_id(0) * C + tl.arange(0, C)
    total, squares = tl.zeros((R, C), tl.float32), tl.zeros((R, C), tl.float32)
    for start in range(begin, end, R):
        inside = (start + r < end) & (c[None, :] < columns)
        numbers = tl.load(x + (start + r) * columns + c[None, :], inside, 0.0)
        total += numbers
        if SQUARES:
            squares += numbers * numbers
    place = tl.program_id(1) * (columns * (1 + SQUARES)) + c
    tl.store(parts + place, tl.sum(total, 0), c < columns)
    if SQUARES:
        tl.store(parts + place + columns, tl.sum(squares, 0), c < columns)


@triton.jit(do_not_specialize=["columns"], do_not_specialize_on_alignment=["out", "bound"])
def cross_entropy(x, target, out, bound, columns, BLOCK: tl.constexpr):
    """out [rows] = Σ -target log σ(x) - (1 - target) log σ(-x) over each row; bound of targets."""
    row = tl.program_id(0)
    total, largest = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, columns, BLOCK):
        c = start + tl.arange(0, BLOCK)
        z = tl.load(x + row * columns + c, c < columns, 0.0)
        t = tl.load(target + row * columns + c, c < columns, 0.0)
        rest = libdevice.log1p(tl.exp(-tl.abs(z)))
        # Written so that NaN stays NaN.
        entropy = tl.where(z < 0, 0.0, z) - z * t + rest
        total += tl.where(c < columns, entropy, 0.0)
        bits = _bits(t)
        largest = tl.maximum(largest, tl.where(bits < INFINITE, bits, 0))
    tl.store(out + row, tl.sum(total, 0))
    tl.atomic_max(bound, tl.max(largest, 0), sem="relaxed")


@triton.jit(
    do_not_specialize=["size", "factor"],
    do_not_specialize_on_alignment=["x", "scale", "other"],
)
def scale_and_add(x, scale, other, size, factor, BLOCK: tl.constexpr):
    """x [size] = x · scale + factor · other."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    scaled = tl.load(x + at, inside, 0.0) * tl.load(scale)
    tl.store(x + at, scaled + factor * tl.load(other + at, inside, 0.0), inside)


@triton.jit(
    do_not_specialize=["least"],
    do_not_specialize_on_alignment=["squared", "before", "place", "scale"],
)
def scale_of_length(squared, before, place, scale, least):
    """scale = 1 / √squared and place = squared; zero where that is not above least · before."""
    number = tl.load(squared)
    # Written so that NaN is no zero.
    vanished = number <= least * tl.load(before)
    tl.store(place, tl.where(vanished, 0.0, number))
    tl.store(scale, tl.where(vanished, 0.0, 1 / tl.sqrt_rn(number)))


@triton.jit(do_not_specialize=["size"])
def move(source, target, size, BLOCK: tl.constexpr):
    """target [size] = source; one of them in the host's memory."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, at < size), at < size)


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
    do_not_specialize=["size", "count", "stride", "span"],
    do_not_specialize_on_alignment=["rows", "vector", "parts"],
)
def project(rows, vector, parts, size, count, stride, span, R: tl.constexpr, C: tl.constexpr):
    """parts [programs, count] = Σ_c rows[count, c] vector[c], over a span of columns each."""
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, size)
    r, c = tl.arange(0, R)[:, None], tl.arange(0, C)[None, :]
    for first in range(0, count, R):
        total = tl.zeros((R, C), tl.float32)
        for start in range(begin, end, C):
            inside = (first + r < count) & (start + c < end)
            numbers = tl.load(rows + (first + r) * stride + (start + c), inside, 0.0)
            total += numbers * tl.load(vector + start + c, start + c < end, 0.0)
        place = tl.program_id(0) * count + first + tl.arange(0, R)
        tl.store(parts + place, tl.sum(total, 1), first + tl.arange(0, R) < count)


@triton.jit(
    do_not_specialize=["programs", "count"], do_not_specialize_on_alignment=["parts", "out"]
)
def add_up_parts(parts, out, programs, count, P: tl.constexpr, R: tl.constexpr):
    """out [count] = Σ parts [programs, count], of which there are P at most."""
    p, r = tl.arange(0, P)[:, None], tl.program_id(0) * R + tl.arange(0, R)
    numbers = tl.load(parts + p * count + r[None, :], (p < programs) & (r[None, :] < count), 0.0)
    tl.store(out + r, tl.sum(numbers, 0), r < count)
