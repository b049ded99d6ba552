"""A model with its loss, one batch at a time.

`Network` computes one loss per sample of a batch, and knows which tensors are trained. Sums over
batches are the work of `objective`. The probes, per-sample gradients and curvature, which need
more than these sums, are built on `Network`.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Batch, Tree
from krylov_descent.objective.losses import Loss, OutputHessian, SampleLoss
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.objective.wrappers import (
    check_whole,
    ddp_in,
    set_aside,
    without_any,
    without_ddp,
)
from krylov_descent.runtime.precision import forward_precision
from krylov_descent.runtime.private import (
    compiler_is_loaded,
    copy_each,
    is_called_directly,
    modules_in,
    own_parameters,
)
from krylov_descent.runtime.threads import Shared

# Both switches belong to the whole process, so threads share these contexts.
_cudnn_off = Shared(partial(torch.backends.cudnn.flags, enabled=False))
_compiler_off = Shared(lambda: torch.compiler.set_stance("force_eager"))

STACK = (nn.Linear, nn.Sigmoid, nn.Tanh, nn.ReLU, nn.Identity, nn.Flatten)

Forward = Callable[[Any, Tree], Tree]
Call = Callable[[], Any]
Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class Network:
    """Model, loss and trainable parameters.

    Args:
        model: any module. A compiled model runs compiled for values and gradients. It is unwrapped
            (`eager`) for second derivatives and per-sample gradients, which compiled code does not
            support. DistributedDataParallel and `replicate` are bypassed (see `wrappers`).
        loss: see `krylov_descent.objective.losses`.
        forward: `forward(model, inputs) -> outputs`; by default `model(inputs)`, `model(*inputs)`
            for a tuple or list, `model(**inputs)` for a dict.
        params: tensors, or parameter groups of torch.optim; by default all parameters of the model.

    Attributes:
        model: the model without DistributedDataParallel.
        eager: the model without DistributedDataParallel and torch.compile.
        loss: the loss as a `SampleLoss`.
        autocast: the dtype of the caller's torch.autocast inside `algebra`; else None.
        parameters: the trainable parameters.
        names: their names in the model.
        scale: the factor on losses and weight decay; see `loss_scale`.
        trusted_layers: names of the Linear layers that passed the probe; see `layer_trust`.

    Raises:
        TypeError: `model` is no module, or its parameters are sharded over ranks by FSDP or tensor
            parallelism; or `loss` or `forward` is not callable.
        ValueError: the model has tensors on the meta device, or `params` are not the model's.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, forward: Forward | None, params: Params | None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, found {type(model).__name__}")
        check_whole(model)
        self.model = without_ddp(model)
        self.eager = without_any(model)
        self._ddp = ddp_in(self.model)
        _check_numbers(self.eager)
        self.loss = SampleLoss(loss)
        if forward is not None and not callable(forward):
            raise TypeError(
                f"`forward` must be callable as forward(model, inputs), found {forward!r}"
            )
        self._forward = forward or _default_forward
        self._ambient: AbstractContextManager[Any] = nullcontext()
        self.autocast: torch.dtype | None = None
        self.parameters = FlatParameters.from_groups(_as_groups(self.eager, params))
        self.names = self._names_of(self.parameters)
        self.scale = 1.0
        self.trusted_layers: frozenset[str] = frozenset()
        self._holder = _Holder(self.eager)

    @property
    def forward(self) -> Forward:
        """The function (model, inputs) → outputs."""
        return self._forward

    @property
    def original(self) -> "Network":
        """The network whose parameters are the modules' own; an aliased network has another one."""
        return self

    @property
    def is_stack(self) -> bool:
        """Whether all leaf modules are Linear layers, activations or Flatten (`STACK`)."""
        leaves = (m for m in self.eager.modules() if not any(True for _ in m.children()))
        return self._forward is _default_forward and all(type(m) in STACK for m in leaves)

    @property
    def is_plain(self) -> bool:
        """Whether the model is an unmodified Sequential stack with one of torch's losses.

        In such a network samples are independent, and no forward pass affects a later one.
        """
        if not (self.is_stack and self.loss.known and self.model is self.eager):
            return False
        modules = list(self.eager.modules())
        containers = (m for m in modules if any(True for _ in m.children()))
        plain = all(type(m) is nn.Sequential for m in containers)
        return plain and all(map(_is_as_torch_has_it, (*modules, self.loss.module)))

    def refresh(self, groups: list[dict[str, Any]]) -> bool:
        """Update trainable parameters and weight decay from `groups`; True if they changed.

        Raises:
            ValueError: a parameter is no longer one of the model's, because a layer was replaced.
        """
        self._ddp = ddp_in(self.model)
        if _are_in(self.parameters, groups) and _holds(self.eager, self.parameters.tensors):
            return False
        parameters = FlatParameters.from_groups(groups)
        names = self._names_of(parameters)  # raises if a layer was replaced
        if parameters.same_as(self.parameters):
            return False
        self.parameters, self.names = parameters, names
        return True

    def rescale(self, scale: float) -> None:
        """Set the power of two by which losses and weight decay are multiplied."""
        self.parameters.scale_decay(scale / self.scale)
        self.scale = scale

    @contextmanager
    def algebra(self) -> Iterator[None]:
        """Context manager that limits the caller's torch.autocast to forward pass and loss."""
        kind = self.parameters.device.type
        if not torch.is_autocast_enabled(kind):
            yield
            return
        self.autocast = torch.get_autocast_dtype(kind)
        self._ambient = torch.autocast(kind, dtype=self.autocast, cache_enabled=False)
        try:
            with torch.autocast(kind, enabled=False):
                yield
        finally:
            self._ambient, self.autocast = nullcontext(), None

    def in_double(self) -> "Network":
        """A copy of model and loss in float64, without autocast. Its forward pass may fail."""
        model = copy.deepcopy(self.eager).double()
        loss = self.loss.module
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).double()
        named = dict(model.named_parameters())
        return Network(model, loss, self._forward, [named[name] for name in self.names])

    def outputs(self, batch: Batch, *, eager: bool = False) -> Tree:
        """The model's outputs for a batch, under the caller's autocast; `eager`: not compiled."""
        bare = set_aside(self._ddp) if self._ddp else nullcontext()
        cudnn, compiler = _cudnn_for(self.model, self.parameters.device), _compiler(off=eager)
        with bare, self._ambient, forward_precision(), cudnn, compiler:
            found = self._forward(self.eager if eager else self.model, batch.inputs)
        if found is None:
            raise TypeError("the forward pass returned None: it must return the outputs")
        return found

    def sample_losses(self, batch: Batch, *, eager: bool = False) -> Tensor:
        """nᵢ of a batch [size], in the autograd graph."""
        return self.losses_of(self.outputs(batch, eager=eager), batch, eager=eager)

    def losses_at(self, point: Tensor, batch: Batch) -> Tensor:
        """nᵢ of a batch [size] at another point [n]. The parameters are not modified."""
        # Copies are aligned in memory like parameters, so that a GPU runs the same kernels.
        values = [torch.empty_like(p) for p in self.parameters.tensors]
        copy_each(values, self.parameters.pieces(point))
        for value in values:
            value.requires_grad_()  # a forward pass may differentiate by its parameters
        network = self.original
        losses: Tensor = network.call_with(
            values, network.names, lambda: network.sample_losses(batch, eager=True)
        )
        return losses

    def losses_of(self, outputs: Tree, batch: Batch, *, eager: bool = False) -> Tensor:
        """nᵢ of a batch [size] for given outputs, in the autograd graph."""
        with self._ambient, forward_precision(), _compiler(off=eager):
            losses = self.loss.per_sample(outputs, batch.targets, batch.size)
        return losses if self.scale == 1 else self.scale * losses

    def output_hessian(self, outputs: Tree, batch: Batch) -> OutputHessian:
        """v → H_E v, with H_E the Hessian of Σ nᵢ with respect to the outputs of a batch."""
        with self._ambient, _compiler(off=True):
            product = self.loss.output_hessian(outputs, batch.targets, batch.size)
        if self.scale == 1:
            return product
        return lambda vectors: [self.scale * z for z in product(vectors)]

    def call_with(self, values: Sequence[Tensor], names: Sequence[str], function: Call) -> Any:
        """Call `function()` with the parameters of these names temporarily replaced by values."""
        given = dict(zip(names, values, strict=True))
        swapped = {
            f"model.{slot}": given[name] for slot, name in _slots(self.eager) if name in given
        }
        # Torch's own handling of tied weights restores parameters in the wrong order if a module is
        # registered under two names: the given values would stay in the model.
        return torch.func.functional_call(self._holder, swapped, (function,), tie_weights=False)

    def gradients(self, losses: Tensor) -> list[Tensor | None]:
        """∂ Σ nᵢ / ∂p for each parameter; None if the losses do not depend on it."""
        require_graph(losses)
        return list(
            torch.autograd.grad(
                losses, self.parameters.tensors, torch.ones_like(losses), allow_unused=True
            )
        )

    def check_leaves(self, roots: Sequence[Tensor]) -> None:
        """Do nothing; an aliased network refuses graphs that do not use its own `parameters`."""

    def _names_of(self, parameters: FlatParameters) -> list[str]:
        names = {id(p): name for name, p in self.eager.named_parameters()}
        for p in parameters.tensors:
            if id(p) not in names:
                raise ValueError(
                    f"`params` holds a tensor of shape {tuple(p.shape)} that is not a parameter "
                    "of `model`: give parameters of the model itself, and where a layer was "
                    "replaced make a new optimiser"
                )
        return [names[id(p)] for p in parameters.tensors]


def _is_as_torch_has_it(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's `forward` and no hooks."""
    return "forward" not in vars(module) and is_called_directly(module)


def _are_in(parameters: FlatParameters, groups: list[dict[str, Any]]) -> bool:
    """Whether `parameters` equal `FlatParameters.from_groups(groups)`; faster than `same_as`."""
    tensors: list[Tensor] = []
    decays: list[float] = []
    for group in groups:
        trained = [p for p in group["params"] if p.requires_grad]
        tensors += trained
        decays += [group.get("weight_decay", 0.0)] * len(trained)
    dtype, device = parameters.dtype, parameters.device
    return (
        len(tensors) == len(parameters.tensors)
        and all(map(operator.is_, tensors, parameters.tensors))
        and decays == parameters.weight_decay
        # Each tensor is checked, because tensors may be moved one by one.
        and all(p.dtype is dtype and p.device == device for p in tensors)
    )


def _holds(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Whether all tensors are parameters of the model, and none belongs to a replaced layer."""
    held = {id(p) for module in modules_in(model) for p in own_parameters(module)}
    return held.issuperset(map(id, tensors))


def _check_numbers(model: nn.Module) -> None:
    """Raise ValueError if a parameter, frozen or not, or a buffer is on the meta device."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing:
        raise ValueError(
            "`model` has tensors on the meta device, which holds no numbers "
            f"({', '.join(missing[:3])}): materialise it first, with model.to_empty(device=...), "
            "and load or initialise its weights"
        )


class _Holder(nn.Module):
    """A parent module that calls any function, so that functional_call can wrap the function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Call) -> Any:
        return function()


def _slots(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(path, parameter name) of each attribute that holds a parameter; several if it is tied."""
    names = {id(p): name for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for attribute, p in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            yield attribute, names[id(p)]


def require_graph(losses: Tensor) -> None:
    """Raise ValueError if the losses depend on no trainable parameter."""
    if not losses.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter: check `params`, requires_grad "
            "and detach() in the forward pass"
        )


def _cudnn_for(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """A context without cuDNN for recurrent nets on a GPU.

    Recurrent nets of cuDNN have no second derivative, and in eval mode no first derivative.
    """
    if device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in modules_in(model)):
        return _cudnn_off
    return nullcontext()


def _compiler(*, off: bool) -> AbstractContextManager[Any]:
    """A context in which compiled parts of model and loss run eagerly if `off`.

    Compiled code has no second derivative.
    """
    # If the compiler was never loaded, nothing is compiled. Loading it takes seconds.
    if off and compiler_is_loaded():
        return _compiler_off
    return nullcontext()


def _default_forward(model: Any, inputs: Tree) -> Tree:
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _as_groups(model: nn.Module, params: Params | None) -> list[dict[str, Any]]:
    given: list[Any] = list(model.parameters()) if params is None else list(params)
    if given and isinstance(given[0], dict):
        return given
    return [{"params": given}]
