"""The private functions of torch and Triton that the library uses; no other file has any.

A private function may go with any release. So each one is reached through one function here, which
says why, for which versions it is known to exist, and what happens without it. Where there is a
public way, that is taken then; where there is none, an AttributeError names what is missing.
`tests/runtime/test_private.py` fails as soon as one has gone.
"""

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
    "forward_hooks",
    "function_of",
    "holds_hooks",
    "is_called_directly",
    "is_hook_of_replicate",
    "leaf_of",
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

# The C++ name of the node that adds a gradient to a leaf.
ACCUMULATE = "torch::autograd::AccumulateGrad"
# Attributes of a module that hold the hooks of its forward pass.
FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


# Operations as they pass by.


class DispatchMode(TorchDispatchMode):
    """A context in which every operation of this thread passes by `__torch_dispatch__`.

    Why: torch has no public way to see the operations inside of modules and backward passes.
    Versions: torch 2.11 to 2.13, in a private module. Without: ImportError.

    `_should_skip_dynamo` is switched off: with it torch loads its compiler when the context is
    first used, which takes a second. Without that switch: a second longer.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def current_dispatch_mode() -> Any:
    """The innermost `DispatchMode` of this thread, or None.

    Why: code that is called by a forward pass asks which mode it runs under. A variable of our own
    would not do: a backward pass has another thread, to which torch hands the mode on.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return torch.utils._python_dispatch._get_current_dispatch_mode()


def schema_of(operation: Any) -> Any:
    """The schema of an operation that passes by: its arguments, and which of them it writes to.

    Why: torch has no public name for the schema of a `torch.ops` operation.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return operation._schema


def transforms_are_active() -> bool:
    """Whether a transform of torch.func (vmap, grad, jvp) is under way in this thread.

    Why: there tensors have no memory of their own, and rules for single operations do not hold.
    Versions: torch 2.11 to 2.13. Without: always True, so that those rules are not used.
    """
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return True if active is None else bool(active())


# Autograd.


def will_be_computed(node: Any) -> bool:
    """Whether the backward pass that is under way goes to a node.

    Why: `needs_input_grad` tells only whether some backward pass could.
    Versions: torch 2.11 to 2.13. Without: always True, which costs needless derivatives.
    """
    ask = getattr(torch._C, "_will_engine_execute_node", None)
    try:
        return True if ask is None else bool(ask(node))
    except RuntimeError:  # a leaf whose gradient is asked for
        return True


def function_of(node: Any) -> type | None:
    """The `torch.autograd.Function` that made a node of the graph; None for torch's own nodes.

    Why: the node itself has the name of the function, but not its module.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    if not isinstance(node, BackwardCFunction):
        return None
    made: Any = type(node)
    found: type = made._forward_cls
    return found


def leaf_of(node: Any) -> Tensor | None:
    """The tensor at which the graph ends in a node; None where it goes on.

    Why: torch documents neither the name of such a node nor that it holds its tensor.
    Versions: torch 2.11 to 2.13. Without: AttributeError, or None if the name has changed.
    """
    found: Tensor | None = node.variable if node.name() == ACCUMULATE else None
    return found


def scales_by_frequency(node: Any) -> bool:
    """Whether a node of the graph is an embedding with `scale_grad_by_freq`.

    Why: a function that was called leaves no other trace of this argument.
    Versions: torch 2.11 to 2.13. Without: always False, so that such functions are not refused.
    """
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


# Tensors.


def writes_of(tensor: Tensor) -> int:
    """How often a tensor was written to; 0 for inference tensors, whose writes are not counted.

    Why: numbers that were written over and put back are seen no other way.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return 0 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """The tensor that this one is a view of, or the tensor itself.

    Why: views are made anew by every access; what they are made of stays.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return tensor if tensor._base is None else tensor._base


def views_like(vector: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of a vector [n], one with the shape of each tensor, n numbers in all; no copy.

    Why: one call takes 0.1 ms for twelve tensors; one `view` for each takes 0.25 ms.
    Versions: torch 2.11 to 2.13. Without: `torch.split` and `view`.
    """
    split = getattr(torch._utils, "_unflatten_dense_tensors", None)
    sizes = [tensor.numel() for tensor in tensors]
    if split is not None and 0 not in sizes:  # it gives an empty tensor the shape [0]
        return list(split(vector, tensors))
    pieces = zip(torch.split(vector, sizes), tensors, strict=True)
    return [piece.view(tensor.shape) for piece, tensor in pieces]


def copy_each(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target.

    Why: on a GPU one kernel does what takes a launch for each tensor otherwise.
    Versions: torch 2.11 to 2.13. Without: one `copy_` for each.
    """
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def add_each(targets: list[Tensor], sources: list[Tensor], factor: float) -> None:
    """Add a factor times each source to its target.

    Why: as `copy_each`. Versions: torch 2.11 to 2.13. Without: one `add_` for each.
    """
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(targets, sources, alpha=factor)
        return
    for target, source in zip(targets, sources, strict=True):
        target.add_(source, alpha=factor)


def norms_of(tensors: list[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each tensor, summed in float64.

    Why: as `copy_each`. Versions: torch 2.11 to 2.13. Without: one `torch.linalg.vector_norm` for
    each.
    """
    if hasattr(torch, "_foreach_norm"):
        return list(torch._foreach_norm(tensors, 2, dtype=torch.float64))
    return [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]


def storage_number(tensor: Tensor) -> int:
    """A number that no other storage has as long as a `StorageWeakRef` to this one is held.

    Why: the address of the memory may be given to another tensor, and empty ones have none.
    Versions: torch 2.11 to 2.13. Without: AttributeError. `StorageWeakRef`, in the same versions,
    has no underscore, but is not documented.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def storage_at(reference: StorageWeakRef) -> torch.UntypedStorage:
    """The storage of a weak reference that has not expired.

    Why: a tensor that nobody in Python holds may still be wanted by autograd.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


# Modules and optimisers.


def is_called_directly(module: nn.Module) -> bool:
    """Whether a call of the module runs its forward pass and nothing else, as written.

    Why: a model is known as a whole only if it has no hooks and is not compiled in place.
    Versions: torch 2.11 to 2.13. Without: always False; nothing is taken for known then.
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
    """What `model.modules()` gives, in the same order.

    Why: every step asks for it several times, and this takes half of the time.
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

    Why: for a network of 25 modules the public way takes 0.1 ms, and every step asks for it.
    Versions: torch 2.11 to 2.13. Without: `module.parameters(recurse=False)`.
    """
    if not hasattr(module, "_parameters"):
        return list(module.parameters(recurse=False))
    return [p for p in module._parameters.values() if p is not None]


def own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers of a module by name, without those of its children.

    Why: most modules have none, and every step asks all of them.
    Versions: torch 2.11 to 2.13. Without: `module.named_buffers(recurse=False)`.
    """
    if not hasattr(module, "_buffers"):
        return list(module.named_buffers(recurse=False))
    if not module._buffers:
        return []
    return [(name, b) for name, b in module._buffers.items() if b is not None]


def forward_hooks(module: nn.Module) -> dict[str, "OrderedDict[int, Any]"]:
    """The hooks of a module's forward pass, by the attributes that hold them.

    Why: `replicate` is a hook, which only who registered it could remove the public way.
    Versions: torch 2.11 to 2.13. Without: AttributeError.
    """
    return {name: getattr(module, name) for name in FORWARD_HOOKS}


def is_hook_of_replicate(hook: Any) -> bool:
    """Whether a hook is one of `replicate`, torch's data parallelism without a wrapper.

    Why: torch has no public way to ask. Nothing is loaded for it: that would take a second.
    Versions: torch 2.11 to 2.13. Without: always False; each rank then sums its gradients twice.
    """
    loaded = sys.modules.get("torch.distributed._composable.replicate")
    state = getattr(loaded, "_ReplicateState", None)
    return state is not None and isinstance(getattr(hook, "__self__", None), state)


def compiled_from(module: Any) -> Any:
    """The module that `torch.compile` was given; None where this one is not compiled.

    Why: compiled code has no second derivative. Versions: torch 2.11 to 2.13.
    Without: always None; then `torch.compiler.set_stance` alone keeps compiled code away.
    """
    return getattr(module, "_orig_mod", None)


def compiler_is_loaded() -> bool:
    """Whether anything can be compiled in this process.

    Why: to ask torch.compiler anything would load the compiler, which takes seconds.
    Versions: torch 2.11 to 2.13. Without: always False; compiled code may then have no second
    derivative.
    """
    return "torch._dynamo" in sys.modules


def holds_hooks(attribute: str) -> bool:
    """Whether an attribute of a torch optimiser holds hooks, which torch does not copy.

    Why: a copy of an optimiser has everything but these. Versions: torch 2.11 to 2.13.
    Without: always False; hooks are then copied, too.
    """
    return attribute.startswith("_optimizer_")


# Processes, CUDA and Triton.


def default_store() -> Any:
    """The key-value store of the default process group; None where it has none, as with MPI.

    Why: a store of our own would need an address of its own.
    Versions: torch 2.11 to 2.13. Without: None; ranks then learn of a failure by a timeout.
    """
    with suppress(AttributeError, ValueError, RuntimeError):
        return dist.distributed_c10d._get_default_store()
    return None


def end_allocation(device: int, pool: Any) -> None:
    """Let memory be allocated elsewhere again, after CUDA broke off a capture into a pool.

    Why: torch does so at the end of a capture, and does not notice an end that CUDA made.
    Versions: torch 2.11 to 2.13, built with CUDA. Without: nothing; the pool's memory is lost.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def specialised_places(kernel: Any) -> Iterator[int]:
    """The arguments of a Triton kernel for which alignment to 16 bytes makes another kernel.

    Why: who keeps compiled kernels must know when another one is to be compiled.
    Versions: those that come with torch 2.11 to 2.13. Without: AttributeError.
    """
    for place, param in enumerate(kernel.params):
        if not (param.is_constexpr or param.do_not_specialize_on_alignment):
            yield place
