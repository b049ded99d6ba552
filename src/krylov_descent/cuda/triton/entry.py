"""Entry to the tensor-core kernels: their dispatch mode, and their operations on a basis."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from krylov_descent.cuda.triton import availability
from krylov_descent.runtime.ops import Operations
from krylov_descent.runtime.private import current_dispatch_mode


def tensor_core_products(
    device: torch.device, before: Any = None, *, sparing: bool = False
) -> AbstractContextManager[Any]:
    """A `TensorCoreProducts` to enter; a context that yields None if it cannot be used."""
    if not availability.possible(device):
        return nullcontext()
    from krylov_descent.cuda.triton.products import TensorCoreProducts  # needs Triton

    return TensorCoreProducts(device, before, sparing=sparing)


def basis_operations(device: torch.device) -> Operations:
    """Operations on the rows of a basis, outside of recordings; torch's if there are no kernels."""
    if not availability.possible(device):
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
