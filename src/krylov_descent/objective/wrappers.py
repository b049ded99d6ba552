"""What torch wraps around models for several processes: set aside where it can be, else refused.

DistributedDataParallel and `replicate` sum gradients in hooks of `backward()`, which is not called
here, and exchange buffers in forward passes, of which ranks make unequal numbers here. The sums
over ranks are made in `ranks`, so these wrappers have nothing to do: wherever in the model
they are, they are set aside for the time of a forward pass.

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
    """The module inside, of a model that is a DistributedDataParallel."""
    inside: Any = model
    while _is_ddp(inside):
        inside = inside.module
    found: nn.Module = inside
    return found


def without_any(model: nn.Module) -> nn.Module:
    """The module inside of DistributedDataParallel and torch.compile, in whatever order."""
    inside: Any = without_ddp(model)
    while (original := compiled_from(inside)) is not None:
        inside = without_ddp(original)
    found: nn.Module = inside
    return found


def ddp_in(model: nn.Module) -> list[nn.Module]:
    """Its modules that are a DistributedDataParallel, or that `replicate` was called with."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []  # then there is none, and every step asks
    return [module for module in modules_in(model) if _is_ddp(module) or _is_replicated(module)]


@contextmanager
def set_aside(wrappers: Sequence[nn.Module]) -> Iterator[None]:
    """For a while, these of `ddp_in` do what the module inside does, and nothing else."""
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
    """Refuse a model whose parameters or buffers are divided among ranks.

    Raises:
        TypeError: it holds a FullyShardedDataParallel or a DTensor; the message names which.
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
    """The attributes with which a wrapper does nothing of its own."""
    if _is_ddp(module):
        return {"forward": module.module}
    return {
        name: OrderedDict(
            (key, hook) for key, hook in hooks.items() if not is_hook_of_replicate(hook)
        )
        for name, hooks in forward_hooks(module).items()
    }


def _loaded(module: str, name: str) -> Any:
    """A class of a module; None where nobody has loaded that yet, which would take a second."""
    return getattr(sys.modules.get(module), name, None)
