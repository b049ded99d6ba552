"""Whether there are tensor cores to use, and the way to them."""

import functools
import importlib.util
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from krylov_descent.losses import first_line

# Of a multiprocessor's memory, which the largest tiles need: Hopper has it, and what came after it.
LEAST_MEMORY = 200 << 10
# Of a product of 100 numbers, with the digits of float32 and of tf32.
TOLERANCES = {True: 1e-6, False: 1e-3}


def tensor_core_products(device: torch.device, before: Any = None) -> AbstractContextManager[Any]:
    """`TensorCoreProducts` for a while, or nothing where that is not possible."""
    if not _possible(device):
        return nullcontext()
    from krylov_descent.tensor_cores.products import TensorCoreProducts

    return TensorCoreProducts(device, before)


def under_way() -> Any:
    """The `TensorCoreProducts` of this moment; None where there is none."""
    mode: Any = _get_current_dispatch_mode()
    return mode if hasattr(mode, "prepare") else None


@functools.cache
def _possible(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    properties: Any = torch.cuda.get_device_properties(device)  # annotations lack some of them
    if properties.shared_memory_per_block_optin < LEAST_MEMORY:
        return False
    try:
        return _works(device)
    except Exception as problem:  # whatever a compiler or a driver may have
        warnings.warn(
            f"Triton's kernels do not work here ({first_line(problem)}); products of float32 "
            "matrices run without them, which is slower for wide layers",
            stacklevel=2,
        )
        return False


def _works(device: torch.device) -> bool:
    """Whether a small product is right."""
    from krylov_descent.tensor_cores import halves

    a, b = torch.linspace(-2, 3, 200 * 100, device=device).sin().view(2, 100, 100)
    zero, bounds = torch.zeros(3, 1, dtype=torch.int32, device=device).split([1, 2])
    for x, bound in zip((a, b), bounds, strict=True):
        halves.find_bound(x, bound)
    split = [halves.split(x, bound, zero[0]) for x, bound in zip((a, b), bounds, strict=True)]
    exact = a.double() @ b.double().t()
    for three, tolerance in TOLERANCES.items():
        found = halves.product(*split, a_along=True, b_along=True, three=three)
        if not (found - exact).norm() <= tolerance * exact.norm():
            raise RuntimeError("a product is wrong")
    return True
