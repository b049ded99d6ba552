"""The power of two that a step multiplies the objective with, so that squares stay in range.

Gradients of a loss of 1e-24 are ordinary numbers in float32, but their squares are zero, and those
of a loss of 1e20 are infinite; in float64 that happens at 1e±200. A step is full of squares: the
Fisher diagonal, inner products of curvature products, slopes of line searches. So the objective is
multiplied at its source, before any derivative is taken. A power of two changes no digit, and for
losses of ordinary size it is 1.
"""

import math

import torch
from torch import Tensor

# ‖g‖ as a power of two: up to where squares are in range, with room for sums and differences; and
# the largest scale, with room for numbers beside the loss, such as weight decay.
LIMITS = {torch.float32: (40, 100), torch.float64: (320, 900)}


def length(vector: Tensor) -> float:
    """‖v‖, also where squares of the entries are out of the range of their dtype.

    NaN or infinite only where an entry is, or where float64 cannot hold the length.

    Cost: that of `vector.norm()`; three passes more, and a copy, where its result is out of range.
    """
    if vector.dtype not in LIMITS:
        vector = vector.float()
    found = float(vector.norm())
    if has_squares(found, vector.dtype) or not vector.numel():
        return found
    largest = float(vector.abs().max())
    if not 0 < largest < math.inf:
        return largest
    return largest * float(vector.div(largest).norm(dtype=torch.float64))


def has_squares(norm: float, dtype: torch.dtype) -> bool:
    """Whether a vector of this length has squares that are well within the range of a dtype."""
    exponent, _ = LIMITS[dtype]
    return 2.0**-exponent <= norm <= 2.0**exponent


def fitting_scale(value: float, norm: float, scale: float, dtype: torch.dtype) -> float:
    """The scale to go on with: the one of now, unless squares of gradients are out of range.

    An even power of two, so that roots of it are exact, too. 1 where the scale of now may be what
    made a number infinite or zero.

    Args:
        value: of the objective, as found with the scale of now.
        norm: ‖g‖, likewise.
        scale: that of now.
        dtype: of the gradient.
    """
    if not (0 < norm < math.inf and math.isfinite(value)):
        return 1.0
    if has_squares(norm, dtype):
        return scale
    _, most = LIMITS[dtype]
    unscaled = math.log2(norm) - math.log2(scale)
    size = math.log2(max(1.0, abs(value) / scale))  # which is to stay in range, too
    return 2.0 ** max(-most, min(most - 2 * round(size / 2), -2 * round(unscaled / 2)))
