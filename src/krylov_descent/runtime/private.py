"""The private functions of torch and Triton that the library uses; no other file uses any.

Any release may drop a private function. So each one is wrapped by a function in this file, which
says why it is needed, in which versions it exists, and what happens without it. The wrapper falls
back to a public way where there is one. Otherwise an AttributeError names the missing function.
`tests/runtime/test_private.py` fails when a private function is gone.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DispatchMode",
    "StorageWeakRef",
    "add_each",
    "base_of",
    "compiled_from",
    "compiler_is_loaded",
    "copy_each",
    "current_dispatch_mode",
    "default_store",
    "end_allocation",
    "fix_cache_keys",
    "forward_hooks",
    "function_of",
    "has_note",
    "holds_hooks",
    "is_called_directly",
    "is_hook_of_replicate",
    "leaf_of",
    "leave_note",
    "modules_in",
    "norms_of",
    "own_buffers",
    "own_parameters",
    "scales_by_frequency",
    "schema_of",
    "specialised_places",
    "storage_at",
    "storage_number",
    "transforms_are_active",
    "views_like",
    "will_be_computed",
    "writes_of",
]

# The C++ name of the autograd node that accumulates the gradient of a leaf.
ACCUMULATE = "torch::autograd::AccumulateGrad"
# Attributes of a module that hold its forward hooks.
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


# Dispatch modes.


class DispatchMode(TorchDispatchMode):
    """A dispatch mode: every operation of this thread goes through `__torch_dispatch__`.

    Why: torch has no public way to intercept the operations inside modules and backward passes.
    Versions: torch 2.11 to 2.13, in a private module. Without: ImportError.

    `_should_skip_dynamo` returns False, because otherwise torch loads its compiler when the mode is
    first entered, which takes a second. Without that method: a second longer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def current_dispatch_mode() -> Any:
    """The innermost `DispatchMode` of this thread, or None.

    Why: code called by a forward pass needs the mode it runs under. A context variable would not
    do: a backward pass runs in another thread, to which torch passes the mode but not the variable.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return torch.utils._python_dispatch._get_current_dispatch_mode()


def schema_of(operation: Any) -> Any:
    """The schema of an operation: its arguments, and which of them it writes to.

    Why: a `torch.ops` operation has no public attribute for its schema.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return operation._schema


def transforms_are_active() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is active in this thread.

    Why: under a transform tensors have no memory of their own, and rules for single operations do
    not hold.
    Versions: torch 2.11 to 2.13. Without: always True, so that the rules are not used.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return True if active is None else bool(active())


# Autograd.


def will_be_computed(node: Any) -> bool:
    """Whether the backward pass that is running will execute a node.

    Why: `needs_input_grad` only tells whether some backward pass could execute it.
    Versions: torch 2.11 to 2.13. Without: always True, which computes needless derivatives.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return True if ask is None else bool(ask(node))
    except RuntimeError:  # raised for a leaf whose gradient is asked for
        return True


def function_of(node: Any) -> type | None:
    """The `torch.autograd.Function` that made a graph node; None for torch's own nodes.

    Why: the node has the name of the function, but not its module.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    if not isinstance(node, BackwardCFunction):
        return None
    made: Any = type(node)
    found: type = made._forward_cls
    return found


def leaf_of(node: Any) -> Tensor | None:
    """The leaf tensor whose gradient a graph node accumulates; None for any other node.

    Why: torch documents neither the name of such a node nor its attribute for the tensor.
    Versions: torch 2.11 to 2.13. Without: AttributeError, or None if the name has changed.
    """
    found: Tensor | None = node.variable if node.name() == ACCUMULATE else None
    return found


def scales_by_frequency(node: Any) -> bool:
    """Whether a graph node is an embedding with `scale_grad_by_freq`.

    Why: a functional call leaves no other trace of this argument.
    Versions: torch 2.11 to 2.13. Without: always False, so that such calls are not refused.
    """
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


# Tensors.


def writes_of(tensor: Tensor) -> int:
    """How often a tensor was written in place; 0 for inference tensors, which have no counter.

    Why: nothing else shows that numbers were overwritten and restored.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """The tensor of which this one is a view, or the tensor itself.

    Why: each access may create a new view, but the base tensor stays the same object.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return tensor if tensor._base is None else tensor._base


def views_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector [n], one with the shape of each tensor, n entries in all; no copy.

    Why: one call takes 0.1 ms for twelve tensors, one `view` per tensor takes 0.25 ms.
    Versions: torch 2.11 to 2.13. Without: `torch.split` and `view`.
    """
    split = getattr(torch._utils, "_unflatten_dense_tensors", None)
    sizes = [tensor.numel() for tensor in tensors]
    if split is not None and 0 not in sizes:  # it would give an empty tensor the shape [0]
        return list(split(vector, tensors))
    pieces = zip(torch.split(vector, sizes), tensors, strict=True)
    return [piece.view(tensor.shape) for piece, tensor in pieces]


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target.

    Why: on a GPU it takes one kernel instead of one launch per tensor.
    Versions: torch 2.11 to 2.13. Without: one `copy_` per tensor.
    """
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def add_each(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """Add factor times each source to its target, in place.

    Why: as `copy_each`. Versions: torch 2.11 to 2.13. Without: one `add_` per tensor.
    """
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(targets, sources, alpha=factor)
        return
    for target, source in zip(targets, sources, strict=True):
        target.add_(source, alpha=factor)


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, computed in float64.

    Why: as `copy_each`. Versions: torch 2.11 to 2.13. Without: one `torch.linalg.vector_norm` per
    tensor.
    """
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    return [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]


def storage_number(tensor: Tensor) -> int:
    """A number for the tensor's storage, unique as long as a `StorageWeakRef` to it is held.

    Why: a memory address may be reused by another tensor, and empty tensors have no address.
    Versions: torch 2.11 to 2.13. Without: AttributeError. `StorageWeakRef` exists in the same
    versions; it has no underscore, but is undocumented.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def storage_at(reference: StorageWeakRef) -> torch.UntypedStorage:
    """The storage of a weak reference that has not expired.

    Why: autograd may still need a tensor that no Python object refers to.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


# Modules and optimisers.


def is_called_directly(module: nn.Module) -> bool:
    """Whether calling the module runs its `forward` as written: no hooks, not compiled in place.

    Why: only then does the class of a module say what the module computes.
    Versions: torch 2.11 to 2.13. Without: always False, so that no module is recognised by its
    class.
    """
    try:
        hooks = (
            *(module._forward_pre_hooks, module._forward_hooks),
            *(module._backward_pre_hooks, module._backward_hooks),
        )
        replaced = module._compiled_call_impl is not None
        return not (replaced or any(hooks) or nn.modules.module._has_any_global_hook())
    except AttributeError:
        return False


def modules_in(model: nn.Module) -> list[nn.Module]:
    """The modules of `model.modules()`, in the same order.

    Why: every step calls it several times, and it takes half as long as `model.modules()`.
    Versions: torch 2.11 to 2.13. Without: `model.modules()`.
    """
    if not hasattr(model, "_modules"):
        return list(model.modules())
    found: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [model]
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found[module] = None
            if module._modules:
                left.extend(reversed(module._modules.values()))
    return list(found)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module without those of its children.

    Why: every step needs them, and for a network of 25 modules the public way takes 0.1 ms.
    Versions: torch 2.11 to 2.13. Without: `module.parameters(recurse=False)`.
    """
    if not hasattr(module, "_parameters"):
        return list(module.parameters(recurse=False))
    return [p for p in module._parameters.values() if p is not None]


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a module by name, without those of its children.

    Why: every step asks every module, and most modules have no buffers.
    Versions: torch 2.11 to 2.13. Without: `module.named_buffers(recurse=False)`.
    """
    if not hasattr(module, "_buffers"):
        return list(module.named_buffers(recurse=False))
    if not module._buffers:
        return []
    return [(name, b) for name, b in module._buffers.items() if b is not None]


def forward_hooks(module: nn.Module) -> dict[str, "OrderedDict[int, Any]"]:
    """The forward hooks of a module, by the attribute that holds them.

    Why: `replicate` is a hook. In public API only the code that registered a hook can remove it.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return {name: getattr(module, name) for name in FORWARD_HOOKS}


def is_hook_of_replicate(hook: Any) -> bool:
    """Whether a hook belongs to `replicate`, torch's data parallelism without a wrapper module.

    Why: torch has no public way to ask. The module is not imported here, which would take a second.
    Versions: torch 2.11 to 2.13. Without: always False; gradients are then summed over ranks twice.
    """
    loaded = sys.modules.get("torch.distributed._composable.replicate")
    state = getattr(loaded, "_ReplicateState", None)
    return state is not None and isinstance(getattr(hook, "__self__", None), state)


def compiled_from(module: Any) -> Any:
    """The module that was passed to `torch.compile`; None if this module is not compiled.

    Why: compiled code has no second derivative. Versions: torch 2.11 to 2.13.
    Without: always None; only `torch.compiler.set_stance` then keeps compiled code away.
    """
    return getattr(module, "_orig_mod", None)


def compiler_is_loaded() -> bool:
    """Whether torch's compiler is loaded in this process.

    Why: any call into torch.compiler loads the compiler, which takes seconds.
    Versions: torch 2.11 to 2.13. Without: always False; compiled code may then have no second
    derivative.
    """
    return "torch._dynamo" in sys.modules


def holds_hooks(attribute: str) -> bool:
    """Whether an attribute of a torch optimiser holds hooks, which torch does not copy.

    Why: a copy of an optimiser has all attributes but these. Versions: torch 2.11 to 2.13.
    Without: always False; hooks are then copied too.
    """
    return attribute.startswith("_optimizer_")


# Processes, CUDA and Triton.


def default_store() -> Any:
    """The key-value store of the default process group; None if it has none, as with MPI.

    Why: a store of our own would need its own network address.
    Versions: torch 2.11 to 2.13. Without: None; ranks then learn of a failure only by a timeout.
    """
    with suppress(AttributeError, ValueError, RuntimeError):
        return dist.distributed_c10d._get_default_store()
    return None


def end_allocation(device: int, pool: Any) -> None:
    """Stop allocating from a memory pool after CUDA has aborted a capture into that pool.

    Why: torch stops at the end of a capture, and does not notice that CUDA aborted one.
    Versions: torch 2.11 to 2.13, built with CUDA. Without: nothing; the pool's memory is lost.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def specialised_places(kernel: Any) -> Iterator[int]:
    """The indices of a Triton kernel's arguments whose 16-byte alignment selects another binary.

    Why: a cache of compiled kernels must know when another compilation is needed.
    Versions: those that come with torch 2.11 to 2.13. Without: AttributeError.
    """
    for place, param in enumerate(kernel.params):
        if not (param.is_constexpr or param.do_not_specialize_on_alignment):
            yield place


def leave_note(name: str) -> None:
    """Leave a note in Triton's cache of compiled kernels, to be found until the cache is emptied.

    Args:
        name: what the note is found by, in hexadecimal digits.

    Why: a note that all kernels are in the cache must vanish with them.
    Versions: those that come with torch 2.11 to 2.13. Without: nothing; see `has_note`.
    """
    with suppress(ImportError, AttributeError):
        _triton_cache(name).put(b"", "note")


def has_note(name: str) -> bool:
    """Whether `leave_note` has been called on this machine for a name.

    Why and versions: as `leave_note`. Without: False; each process tries out the kernels.
    """
    with suppress(ImportError, AttributeError):
        return _triton_cache(name).get_file("note") is not None
    return False


def _triton_cache(name: str) -> Any:
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(name)


def fix_cache_keys(functions: Iterable[Any]) -> None:
    """Let Triton compute the cache keys of its functions, each after those that it calls.

    Why: the key of a kernel also depends on which of the functions that it calls have a key
    already, so a process that runs kernels in another order would not find them in the cache.
    Versions: those that come with torch 2.11 to 2.13. Without: such kernels are compiled again.
    """
    for function in functions:
        getattr(function, "cache_key", None)
