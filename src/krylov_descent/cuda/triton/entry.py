"""Whether kernels on tensor cores can be used, and the way to them."""

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.private import current_dispatch_mode

# Bytes of a multiprocessor's shared memory that the largest tiles need. Hopper has them, and data
# centre GPUs after it.
LEAST_MEMORY = 200 << 10


def tensor_core_products(
    device: torch.device, before: Any = None, *, sparing: bool = False
) -> AbstractContextManager[Any]:
    """A `TensorCoreProducts` to enter, or a context that gives None where it cannot be used."""
    if not possible(device):
        return nullcontext()
    from krylov_descent.cuda.triton.products import TensorCoreProducts  # needs Triton

    return TensorCoreProducts(device, before, sparing=sparing)


def under_way() -> Any:
    """The `TensorCoreProducts` of this moment; None where there is none, or a sparing one.

    Also within a backward pass, which autograd runs in a thread of its own: torch hands on the
    dispatch mode, and no other context.
    """
    mode: Any = current_dispatch_mode()
    return mode if getattr(mode, "sparing", None) is False else None


@functools.cache
def possible(device: torch.device) -> bool:
    """Whether Triton is installed, the GPU has room for the tiles, and the kernels work on it.

    Warns where they should work and do not.
    """
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    properties: Any = torch.cuda.get_device_properties(device)  # annotations lack some of them
    if properties.shared_memory_per_block_optin < LEAST_MEMORY:
        return False
    try:
        from krylov_descent.cuda.triton import trial  # needs Triton

        trial.try_out(device)
    except Exception as problem:  # whatever a compiler or a driver may raise
        warnings.warn(
            f"Triton's kernels do not work here ({first_line(problem)}); products of float32 "
            "matrices run without them, which is slower",
            stacklevel=2,
        )
        return False
    return True
