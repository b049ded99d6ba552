"""A few numbers between host and GPU as a part of what is recorded.

In a recording a kernel that reads or writes the host's memory takes a few microseconds, and a copy
several times that.
"""

import torch
from torch import Tensor

from krylov_descent.cuda.triton.entry import under_way


def fetched(numbers: Tensor, device: torch.device) -> Tensor:
    """What is in pinned memory, on the GPU."""
    products = under_way()
    if products is None:
        return numbers.to(device, non_blocking=True)
    found = torch.empty_like(numbers, device=device, pin_memory=False)
    products.move(numbers, found)
    return found


def brought(numbers: Tensor, target: Tensor) -> None:
    """Write numbers from the GPU to pinned memory."""
    products = under_way()
    if products is None:
        target.copy_(numbers, non_blocking=True)
    else:
        products.move(numbers, target)
