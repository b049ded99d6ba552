"""Entry to the tensor-core kernels: whether they can be used, and their dispatch mode."""

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.ops import Operations
from krylov_descent.runtime.private import current_dispatch_mode

# Bytes of a multiprocessor's shared memory that the largest tiles need. Hopper and later data
# centre GPUs have them.
LEAST_MEMORY = 200 << 10


def tensor_core_products(
    device: torch.device, before: Any = None, *, sparing: bool = False
) -> AbstractContextManager[Any]:
    """A `TensorCoreProducts` to enter; a context that yields None if it cannot be used."""
    if not possible(device):
        return nullcontext()
    from krylov_descent.cuda.triton.products import TensorCoreProducts  # needs Triton

    return TensorCoreProducts(device, before, sparing=sparing)


def basis_operations(device: torch.device) -> Operations:
    """Operations on the rows of a basis, outside of recordings; torch's if there are no kernels."""
    if not possible(device):
        return Operations()
    from krylov_descent.cuda.triton.vectors import LongRows  # needs Triton

    return LongRows(device)


def under_way() -> Any:
    """The active `TensorCoreProducts`; None if there is none, or if it is a sparing one.

    Works within a backward pass, too: autograd's thread inherits the dispatch mode and no other
    context.
    """
    mode: Any = current_dispatch_mode()
    return mode if getattr(mode, "sparing", None) is False else None


@functools.cache
def possible(device: torch.device) -> bool:
    """Whether Triton is installed, tiles fit in shared memory, and the kernels work on the GPU.

    Warns if the kernels should work and do not.
    """
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    properties: Any = torch.cuda.get_device_properties(device)  # annotations lack some fields
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
