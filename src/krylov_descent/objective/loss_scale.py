"""The power of two by which a step multiplies the objective, so that squares stay in range.

In float32 the gradients of a loss of 1e-24 are representable, but their squares underflow to zero.
The squares of gradients of a loss of 1e20 overflow. In float64 this happens at 1e±200. A step
computes many squares: the Fisher diagonal, inner products of curvature products, slopes of line
searches. So the objective is multiplied at its source, before any derivative is taken.
Multiplication by a power of two is exact. For losses of ordinary size the scale is 1.
"""

import math

import torch
from torch import Tensor

# Exponents (e, s) of two. Squares are in range for 2^-e ≤ ‖g‖ ≤ 2^e, with room for sums and
# differences. The scale stays between 2^-s and 2^s, with room for terms such as weight decay.
LIMITS = {torch.float32: (40, 100), torch.float64: (320, 900)}


def length(vector: Tensor) -> float:
    """‖v‖, even if squares of the entries overflow or underflow in their dtype.

    NaN or infinite only if an entry is, or if float64 cannot represent ‖v‖.

    Cost: one `vector.norm()`; if its result is out of range, three more passes and a copy.
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
    """Whether the squares of a vector with this norm are well within the range of a dtype."""
    exponent, _ = LIMITS[dtype]
    return 2.0**-exponent <= norm <= 2.0**exponent


def fitting_scale(value: float, norm: float, scale: float, dtype: torch.dtype) -> float:
    """The scale to use next: the current one, unless squares of gradients are out of range.

    The scale is an even power of two, so that its square root is exact, too. It is 1 if the value
    or norm is not finite or the norm is zero, because the current scale may be the cause.

    Args:
        value: the objective under the current scale.
        norm: ‖g‖ under the current scale.
        scale: the current scale.
        dtype: the dtype of the gradient.
    """
    if not (0 < norm < math.inf and math.isfinite(value)):
        return 1.0
    if has_squares(norm, dtype):
        return scale
    _, most = LIMITS[dtype]
    unscaled = math.log2(norm) - math.log2(scale)
    size = math.log2(max(1.0, abs(value) / scale))  # the scaled value must stay in range, too
    return 2.0 ** max(-most, min(most - 2 * round(size / 2), -2 * round(unscaled / 2)))
