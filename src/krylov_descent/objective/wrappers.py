"""Torch's wrappers of models for several processes: bypassed if possible, else refused.

DistributedDataParallel and `replicate` sum gradients in hooks of `backward()`, which this library
does not call. They also exchange buffers in every forward pass, but here ranks make unequal
numbers of forward passes. `ranks` computes the sums over ranks instead. So these wrappers are
bypassed during a forward pass, wherever they are in the model.

FSDP and tensor parallelism leave no rank with whole parameters. They are refused.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from krylov_descent.runtime.private import (
    compiled_from,
    forward_hooks,
    is_hook_of_replicate,
    modules_in,
)

WHAT_TO_DO = (
    "a step needs whole parameters on every rank: leave that out and give each rank the whole "
    "model; KSD(basis='sharded') divides the vectors of the basis, which are most of the memory, "
    "among the ranks instead"
)


def without_ddp(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; the model itself if it is not wrapped."""
    inside: Any = model
    while _is_ddp(inside):
        inside = inside.module
    found: nn.Module = inside
    return found


def without_any(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel and torch.compile, nested in any order."""
    inside: Any = without_ddp(model)
    while (original := compiled_from(inside)) is not None:
        inside = without_ddp(original)
    found: nn.Module = inside
    return found


def ddp_in(model: nn.Module) -> list[nn.Module]:
    """The submodules that are a DistributedDataParallel, or that `replicate` was called on."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []  # there can be none, and every step calls this
    return [module for module in modules_in(model) if _is_ddp(module) or _is_replicated(module)]


@contextmanager
def set_aside(wrappers: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager in which wrappers found by `ddp_in` only call the module inside."""
    changes = [(vars(module), _bare(module)) for module in wrappers]
    before = [{name: own[name] for name in bare if name in own} for own, bare in changes]
    for own, bare in changes:
        own.update(bare)
    try:
        yield
    finally:
        for (own, bare), kept in zip(changes, before, strict=True):
            for name in bare:
                del own[name]
            own.update(kept)


def check_whole(model: nn.Module) -> None:
    """Refuse a model whose parameters or buffers are sharded over ranks.

    Raises:
        TypeError: the model holds a FullyShardedDataParallel or a DTensor; the message names it.
    """
    fsdp = _loaded("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp):
            which = f"the module {name} of `model`" if name else "`model`"
            raise TypeError(f"{which} is a FullyShardedDataParallel (FSDP1), and {WHAT_TO_DO}")
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            if hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh"):
                raise TypeError(
                    f"the {kind} {name} is a DTensor, as `fully_shard` (FSDP2) and tensor "
                    f"parallelism (`parallelize_module`) make them, and {WHAT_TO_DO}"
                )


def _is_ddp(module: nn.Module) -> bool:
    return torch.distributed.is_available() and isinstance(
        module, nn.parallel.DistributedDataParallel
    )


def _is_replicated(module: nn.Module) -> bool:
    return any(
        is_hook_of_replicate(hook)
        for hooks in forward_hooks(module).values()
        for hook in hooks.values()
    )


def _bare(module: nn.Module) -> dict[str, Any]:
    """The attributes of a wrapper that make it only call the module inside."""
    if _is_ddp(module):
        return {"forward": module.module}
    return {
        name: OrderedDict(
            (key, hook) for key, hook in hooks.items() if not is_hook_of_replicate(hook)
        )
        for name, hooks in forward_hooks(module).items()
    }


def _loaded(module: str, name: str) -> Any:
    """A class of a module; None if the module is not imported. Importing it takes a second."""
    return getattr(sys.modules.get(module), name, None)
