"""TensorFloat-32 for a while, where three digits are enough."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def matmul_in_tf32(wanted: bool) -> Iterator[None]:
    """Matrix products of float32 in TensorFloat-32, on GPUs that have it."""
    if not wanted:  # to write back what was read would end its being inherited
        yield
        return
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before
