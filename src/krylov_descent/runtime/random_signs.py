"""Random signs that need no generator: every machine and every step has the same ones."""

import torch
from torch import Tensor


def signs_like(tensors: list[Tensor]) -> list[Tensor]:
    """±1 in the shape of each tensor, the same on every machine and at every step.

    A sign is a hash of its position, as in counter-based random generators (with SplitMix64's
    multipliers), so no generator needs a state. Positions continue from tensor to tensor.
    """
    signs, first = [], 1
    for z in tensors:
        x = torch.arange(first, first + z.numel(), device=z.device) * -7046029254386353131
        for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
            x = (x ^ (x >> shift)) * factor
        signs.append(((x ^ (x >> 31)) & 1).mul_(2).sub_(1).to(z.dtype).reshape(z.shape))
        first += z.numel()
    return signs
