"""A model with its loss, one batch at a time.

`Network` knows how a batch becomes one number per sample and which tensors are trained. It
walks over no data and sums nothing: that is `objective`'s work. Everything that needs to look
inside a batch (the probes, per-sample gradients, curvature) is built on it.
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

# Both are switches of the whole process.
_cudnn_off = Shared(partial(torch.backends.cudnn.flags, enabled=False))
_compiler_off = Shared(lambda: torch.compiler.set_stance("force_eager"))

STACK = (nn.Linear, nn.Sigmoid, nn.Tanh, nn.ReLU, nn.Identity, nn.Flatten)

Forward = Callable[[Any, Tree], Tree]
Call = Callable[[], Any]
Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class Network:
    """Model, loss and trainable parameters.

    Args:
        model: any module. A compiled model is used as it is for values, and unwrapped (`eager`)
            where second derivatives or per-sample gradients are needed, which compiled code lacks.
            DistributedDataParallel and `replicate` are set aside wherever they are (`wrappers`).
        loss: see `krylov_descent.objective.losses`.
        forward: `forward(model, inputs) -> outputs`; by default `model(inputs)`, `model(*inputs)`
            for a tuple or list, `model(**inputs)` for a dict.
        params: tensors, or groups as torch.optim has them; all of the model's by default.

    Attributes:
        scale: what losses and weight decay are multiplied with; see `loss_scale`.

    Raises:
        TypeError: the parameters are divided among ranks, by FSDP or tensor parallelism.
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
        self.autocast: torch.dtype | None = None  # of the forward pass, where there is one
        self.parameters = FlatParameters.from_groups(_as_groups(self.eager, params))
        self.names = self._names_of(self.parameters)
        self.scale = 1.0
        # Of Linear layers, by name; the probe finds them out (see `layer_trust`).
        self.trusted_layers: frozenset[str] = frozenset()
        self._holder = _Holder(self.eager)

    @property
    def forward(self) -> Forward:
        """How inputs become outputs."""
        return self._forward

    @property
    def original(self) -> "Network":
        """The network whose parameters are those that the modules hold: this one."""
        return self

    @property
    def is_stack(self) -> bool:
        """Whether all that it is made of is Linear layers and plain functions between them."""
        leaves = (m for m in self.eager.modules() if not any(True for _ in m.children()))
        return self._forward is _default_forward and all(type(m) in STACK for m in leaves)

    @property
    def is_plain(self) -> bool:
        """Whether it is known as a whole: a Sequential stack with a loss of torch's, as they are.

        So no sample's loss depends on the others of its batch, and no pass leaves anything behind
        for the next one.
        """
        if not (self.is_stack and self.loss.known and self.model is self.eager):
            return False
        modules = list(self.eager.modules())
        containers = (m for m in modules if any(True for _ in m.children()))
        plain = all(type(m) is nn.Sequential for m in containers)
        return plain and all(map(_is_as_torch_has_it, (*modules, self.loss.module)))

    def refresh(self, groups: list[dict[str, Any]]) -> bool:
        """Look again at what requires a gradient and at weight decay; True if that changed."""
        self._ddp = ddp_in(self.model)
        if _are_in(self.parameters, groups) and _holds(self.eager, self.parameters.tensors):
            return False
        parameters = FlatParameters.from_groups(groups)
        names = self._names_of(parameters)  # also finds a layer that was replaced
        if parameters.same_as(self.parameters):
            return False
        self.parameters, self.names = parameters, names
        return True

    def rescale(self, scale: float) -> None:
        """Multiply losses and weight decay with another power of two from now on."""
        self.parameters.scale_decay(scale / self.scale)
        self.scale = scale

    @contextmanager
    def algebra(self) -> Iterator[None]:
        """Keep an ambient torch.autocast for the forward pass and away from everything else."""
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
        """A copy of model and loss in float64, without autocast; it may not run."""
        model = copy.deepcopy(self.eager).double()
        loss = self.loss.module
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).double()
        named = dict(model.named_parameters())
        return Network(model, loss, self._forward, [named[name] for name in self.names])

    def outputs(self, batch: Batch, *, eager: bool = False) -> Tree:
        """The model's outputs for a batch, under the caller's autocast."""
        bare = set_aside(self._ddp) if self._ddp else nullcontext()
        cudnn, compiler = _cudnn_for(self.model, self.parameters.device), _compiler(off=eager)
        with bare, self._ambient, forward_precision(), cudnn, compiler:
            found = self._forward(self.eager if eager else self.model, batch.inputs)
        if found is None:
            raise TypeError("the forward pass returned None: it must return the outputs")
        return found

    def sample_losses(self, batch: Batch, *, eager: bool = False) -> Tensor:
        """nᵢ of a batch [size], part of the autograd graph."""
        return self.losses_of(self.outputs(batch, eager=eager), batch, eager=eager)

    def losses_at(self, point: Tensor, batch: Batch) -> Tensor:
        """nᵢ of a batch [size] at another point [n]; the parameters stay as they are."""
        # Copies begin evenly as parameters do, so that a GPU takes the same kernels.
        values = [torch.empty_like(p) for p in self.parameters.tensors]
        copy_each(values, self.parameters.pieces(point))
        for value in values:
            value.requires_grad_()  # a forward pass may differentiate towards its own parameters
        network = self.original
        losses: Tensor = network.call_with(
            values, network.names, lambda: network.sample_losses(batch, eager=True)
        )
        return losses

    def losses_of(self, outputs: Tree, batch: Batch, *, eager: bool = False) -> Tensor:
        """nᵢ of a batch [size] for outputs that are there already."""
        with self._ambient, forward_precision(), _compiler(off=eager):
            losses = self.loss.per_sample(outputs, batch.targets, batch.size)
        return losses if self.scale == 1 else self.scale * losses

    def output_hessian(self, outputs: Tree, batch: Batch) -> OutputHessian:
        """The loss's Hessian in the outputs, Σ over the batch, as v → H_E v."""
        with self._ambient, _compiler(off=True):
            product = self.loss.output_hessian(outputs, batch.targets, batch.size)
        if self.scale == 1:
            return product
        return lambda vectors: [self.scale * z for z in product(vectors)]

    def call_with(self, values: Sequence[Tensor], names: Sequence[str], function: Call) -> Any:
        """`function()` with the parameters of these names swapped for values, for a while."""
        given = dict(zip(names, values, strict=True))
        swapped = {
            f"model.{slot}": given[name] for slot, name in _slots(self.eager) if name in given
        }
        # torch's own search for tied weights leaves its values behind in the model when a module
        # is registered under two names: it would put them back in the wrong order.
        return torch.func.functional_call(self._holder, swapped, (function,), tie_weights=False)

    def gradients(self, losses: Tensor) -> list[Tensor | None]:
        """∂ Σ nᵢ / ∂p for each parameter; None where the losses do not depend on it."""
        require_graph(losses)
        return list(
            torch.autograd.grad(
                losses, self.parameters.tensors, torch.ones_like(losses), allow_unused=True
            )
        )

    def check_leaves(self, roots: Sequence[Tensor]) -> None:
        """Refuse what has no derivative towards `parameters`; see `Aliased`."""

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
    """Whether a call of it does what its class does, and nothing else."""
    return "forward" not in vars(module) and is_called_directly(module)


def _are_in(parameters: FlatParameters, groups: list[dict[str, Any]]) -> bool:
    """Whether they are what these groups have to train: `FlatParameters.same_as`, but quick."""
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
        # Of each: they may have been moved one by one.
        and all(p.dtype is dtype and p.device == device for p in tensors)
    )


def _holds(model: nn.Module, tensors: Sequence[Tensor]) -> bool:
    """Whether all of them are parameters of the model, none of a layer that was replaced."""
    held = {id(p) for module in modules_in(model) for p in own_parameters(module)}
    return held.issuperset(map(id, tensors))


def _check_numbers(model: nn.Module) -> None:
    """Refuse parameters and buffers on the meta device, frozen ones, too."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    missing = [name for name, tensor in tensors if tensor.is_meta]
    if missing:
        raise ValueError(
            "`model` has tensors on the meta device, which holds no numbers "
            f"({', '.join(missing[:3])}): materialise it first, with model.to_empty(device=...), "
            "and load or initialise its weights"
        )


class _Holder(nn.Module):
    """The model as a child of a module that calls any function, for functional_call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Call) -> Any:
        return function()


def _slots(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(place, name) of each place that holds a parameter; tied weights have several places."""
    names = {id(p): name for name, p in model.named_parameters()}
    for prefix, module in model.named_modules():
        for attribute, p in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            yield attribute, names[id(p)]


def require_graph(losses: Tensor) -> None:
    """Refuse losses that no trainable parameter has an influence on."""
    if not losses.requires_grad:
        raise ValueError(
            "the loss does not depend on any trainable parameter: check `params`, requires_grad "
            "and detach() in the forward pass"
        )


def _cudnn_for(model: nn.Module, device: torch.device) -> AbstractContextManager[Any]:
    """CuDNN's recurrent nets have no second derivative, and in eval mode not even a first."""
    if device.type == "cuda" and any(isinstance(m, nn.RNNBase) for m in modules_in(model)):
        return _cudnn_off
    return nullcontext()


def _compiler(*, off: bool) -> AbstractContextManager[Any]:
    """Compiled code has no second derivative, wherever it is in the model: a part, the loss."""
    # Where the compiler was never loaded nothing is compiled; loading it takes seconds.
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
