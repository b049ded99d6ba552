"""Whether there are tensor cores to use, and the way to them."""

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.private import current_dispatch_mode

# Of a multiprocessor's memory, which the largest tiles need: Hopper has it, and what came after it
# in data centres.
LEAST_MEMORY = 200 << 10


def tensor_core_products(
    device: torch.device, before: Any = None, *, sparing: bool = False
) -> AbstractContextManager[Any]:
    """`TensorCoreProducts` for a while, or nothing where that is not possible."""
    if not possible(device):
        return nullcontext()
    from krylov_descent.cuda.triton.products import TensorCoreProducts  # needs Triton

    return TensorCoreProducts(device, before, sparing=sparing)


def under_way() -> Any:
    """The `TensorCoreProducts` of this moment; None where there is none, or a sparing one."""
    mode: Any = current_dispatch_mode()
    return mode if getattr(mode, "sparing", None) is False else None


@functools.cache
def possible(device: torch.device) -> bool:
    """Whether there are tensor cores that the kernels are for, and the kernels work."""
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    properties: Any = torch.cuda.get_device_properties(device)  # annotations lack some of them
    if properties.shared_memory_per_block_optin < LEAST_MEMORY:
        return False
    try:
        from krylov_descent.cuda.triton import trial  # needs Triton

        trial.try_out(device)
    except Exception as problem:  # whatever a compiler or a driver may have
        warnings.warn(
            f"Triton's kernels do not work here ({first_line(problem)}); products of float32 "
            "matrices run without them, which is slower",
            stacklevel=2,
        )
        return False
    return True
