"""Buffers of a model, restored after forward passes that only find out about it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from krylov_descent.runtime.private import modules_in, own_buffers


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Context manager that restores every buffer bit for bit, except views of parameters."""
    before = [
        (module, name, buffer, buffer.clone())
        for module in modules_in(model)
        for name, buffer in own_buffers(module)
    ]
    places = (p.untyped_storage().data_ptr() for p in model.parameters())
    parameters = set(places) if before else set()
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in before:
                setattr(module, name, buffer)  # the forward pass may have replaced it
                shared = buffer.untyped_storage().data_ptr() in parameters
                if not shared and not _is_expanded(buffer):
                    buffer.copy_(copy)


def _is_expanded(tensor: Tensor) -> bool:
    """Whether several entries share one memory location, so that torch refuses writes."""
    return any(s == 0 and size > 1 for s, size in zip(tensor.stride(), tensor.shape, strict=True))
