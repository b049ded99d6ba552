"""The kernel of `chains`, in Triton's language."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from krylov_descent.cuda.triton.kernels import (
    _MULTIPLE,
    _TANH,
    INFINITE,
    _bits,
    _scale,
    _sigmoid,
)

# Of a chain at most. Their memory comes as arguments, a tuple of so many for each purpose.
STAGES = 6
# Triton compiles a kernel for what it knows of the numbers in a tuple. So they are all multiples of
# 16, and it always knows the same.
UNIT = 16
# What a stage is, as a number: whether there is a function, and something to add; its columns, and
# the terms of its sums.
APPLIED, ADDED, COLUMN, TERM = 1, 2, 4, 1024
_STAGES, _UNIT = tl.constexpr(STAGES), tl.constexpr(UNIT)
_APPLIED, _ADDED = tl.constexpr(APPLIED), tl.constexpr(ADDED)
_COLUMN, _TERM = tl.constexpr(COLUMN), tl.constexpr(TERM)


@triton.jit
def _of(stage, things):
    found = things[0]
    for i in tl.static_range(1, _STAGES):
        found = tl.where(stage == i, things[i], found)
    return found


@triton.jit
def _weights(half, K, N, B_ALONG: tl.constexpr, WIDTH: tl.constexpr):
    """A half of b as [K, N], with zeros around it; in memory k is along its rows or columns."""
    k, n = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    if B_ALONG:
        stride = tl.cdiv(K, _UNIT) * _UNIT
        return tl.load(half + n * stride + k, (n < N) & (k < stride), 0.0)
    stride = tl.cdiv(N, _UNIT) * _UNIT
    return tl.load(half + k * stride + n, (k < K) & (n < stride), 0.0)


@triton.jit(
    do_not_specialize=["count", "M", "first", "second", "third", "if_positive"],
    do_not_specialize_on_alignment=["unscale_a", "bounds"],
)
def chain(
    high_a,
    low_a,
    unscale_a,
    highs_b,
    lows_b,
    unscales_b,
    added,
    begins,
    ys,
    values,
    highs,
    lows,
    unscales,
    bounds,
    slots,
    forms,
    count,
    M,
    first,
    second,
    third,
    if_positive,
    KIND: tl.constexpr,
    B_ALONG: tl.constexpr,
    THREE: tl.constexpr,
    BM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Stage by stage x [M, N] = f(a bᵀ + added, y), with x as the next a; BM rows by each program.

    KIND is a function with values up to one, and what is added is a bias [N]; or `MULTIPLE`, as of
    one product, and what is added is a matrix [M, N]. A stage may lack what is added, or the
    function. Of those with values up to one halves are written as well, and of the others bounds.

    What the next product needs stays with the program, so nothing is read back: halves of a with a
    scale for each row, by its own largest number. (One scale for all rows would be known only when
    all programs are here; what it could be at most grows too fast from stage to stage.)
    """
    m, n = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, WIDTH)[None, :]
    rows = m[:, None] < M
    stride = tl.cdiv(forms[0] // _UNIT // _TERM, _UNIT) * _UNIT
    at = m[:, None] * stride + n
    a = tl.load(high_a + at, n < stride, 0.0)  # rows are filled up to a multiple of BM
    rest_a = a
    if THREE:
        rest_a = tl.load(low_a + at, n < stride, 0.0)
    unscale = tl.zeros((BM,), tl.float32) + tl.load(unscale_a)
    for stage in range(count):
        form = _of(stage, forms) // _UNIT
        # Not what the stage before has, so that weights are fetched while that is under way.
        K, N = form // _TERM, form % _TERM // _COLUMN
        applied, with_added = (form & _APPLIED) != 0, (form & _ADDED) != 0
        inside, place = rows & (n < N), m[:, None] * N + n
        # All that is read, before what takes time.
        b = _weights(_of(stage, highs_b), K, N, B_ALONG, WIDTH)
        to_add = _of(stage, added) + _of(stage, begins) // _UNIT
        if KIND == _MULTIPLE:
            addend = tl.load(to_add + place, inside & with_added, 0.0)
            y = tl.load(_of(stage, ys) + place, inside & applied, 0.0)
        else:
            addend = tl.load(to_add + n, (n < N) & with_added, 0.0)
        other = tl.load(_of(stage, unscales_b))
        if THREE:
            rest_b = _weights(_of(stage, lows_b), K, N, B_ALONG, WIDTH)
            some = tl.dot(rest_a, b)
            total = tl.dot(a, b) + tl.dot(a, rest_b, some)
        else:
            total = tl.dot(a, b)
        # The smaller first, so as not to overflow on the way.
        total *= tl.minimum(unscale, other)[:, None]
        total = total * tl.maximum(unscale, other)[:, None] + addend
        if KIND == _MULTIPLE:
            factor = first + y * (second + y * third)
            factor = tl.where((if_positive != 0) & (y <= 0), 0.0, factor)
            total *= tl.where(applied, factor, 1.0)
        elif KIND == _TANH:
            total = tl.where(applied, libdevice.tanh(total), total)
        else:
            total = tl.where(applied, _sigmoid(total), total)
        total = tl.where(inside, total, 0.0)
        tl.store(_of(stage, values) + place, total, inside)
        bits = _bits(total)
        largest = tl.max(tl.where(bits < INFINITE, bits, 0), 1)
        top = largest.to(tl.float32, bitcast=True)
        in_one = applied & (KIND != _MULTIPLE)
        if not in_one:
            slot = _of(stage, slots) // _UNIT
            tl.atomic_max(bounds + slot, tl.max(largest, 0), sem="relaxed")
        scale = _scale(tl.where(in_one, 1.0, top))
        unscale = 1 / scale
        total *= scale[:, None]
        a = total.to(tl.float16)
        if THREE:
            rest = tl.where(_bits(total) < INFINITE, total - a.to(tl.float32), 0.0)
            rest_a = rest.to(tl.float16)
        else:
            rest_a = a
        if KIND != _MULTIPLE:
            width = tl.cdiv(N, _UNIT) * _UNIT
            to, written = m[:, None] * width + n, (n < width) & applied
            tl.store(_of(stage, highs) + to, a, written)
            if THREE:
                tl.store(_of(stage, lows) + to, rest_a, written)
            if applied & (tl.program_id(0) == 0):
                tl.store(_of(stage, unscales), tl.max(unscale, 0))
