"""The kernel of `cross_entropy`, in Triton's language."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from krylov_descent.cuda.triton.kernels import _bits, _number, _scale, _store_split


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
    """The cross entropy of each row of x and target [rows, units · UNIT], perhaps with delta.

    losses [rows] = share · Σ -target log σ(x) - (1 - target) log σ(-x).

    delta, like x, is the derivative of Σ losses: share · (σ(x) - target). Its split is
    high + low = delta · scale [programs, width], zero outside of x. Scale and bound are for what it
    could be at most, which is known beforehand.
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
        smaller = tl.exp(-tl.abs(z))  # of 1 and exp(z), over the larger one
        # Written so that NaN stays NaN.
        entropy = tl.where(z < 0, 0.0, z) - z * t + libdevice.log1p(smaller)
        total += tl.where(inside, entropy, 0.0)
        if DELTA:
            sigmoid = tl.where(z < 0, smaller, 1.0) / (1 + smaller)
            v = tl.where(inside, (sigmoid - t) * share, 0.0)
            tl.store(delta + at, v, inside)
            _store_split(v * scale, high, low, row * width + c, c < width, with_low)
    tl.store(losses + row, share * tl.sum(total, 0), is_row)
