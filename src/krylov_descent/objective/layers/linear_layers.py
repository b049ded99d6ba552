"""Derivatives through Linear layers from recorded inputs x, outputs z and cotangents δ of z.

The parameters of a Linear layer affect the loss only through z = xWᵀ + b. So autograd
differentiates with respect to z (see `layer_gradients`), and this file maps between z and the
parameters:

    cotangents of the parameters   ∂W = δᵀx,  ∂b = Σ δ
    tangent of z                   dz = x dWᵀ + db

Each is one matrix product for all calls of a layer (a recurrent net calls it at every time step).
Autograd takes several products for each call and adds them up.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from krylov_descent.runtime.ops import operations
from krylov_descent.runtime.private import modules_in, transforms_are_active, writes_of

# Inputs that are zero in all samples are left out of products only if at most this part of the
# inputs remains. Leaving them out costs one copy of x, and a copy of the weight per product.
MOST_NONZERO = 0.9
NUMPYS = (torch.float32, torch.float64)


@dataclass(slots=True)
class LinearLayer:
    """The calls of one Linear layer in one forward pass.

    Attributes:
        module: the layer.
        inputs: x of each call [m, …, in], detached.
        outputs: z of each call [m, …, out], in the autograd graph.
        sources: the autograd node that made each x; None if x requires no gradient.
        versions: the version counters of x and z at each call; writes in place change them.
    """

    module: nn.Linear
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def add(self, x: Tensor, z: Tensor) -> None:
        """Record a call."""
        self.inputs.append(x.detach())
        self.outputs.append(z)
        self.sources.append(get_gradient_edge(x).node if x.requires_grad else None)
        self.versions.append((writes_of(x), writes_of(z)))

    def in_graph(self) -> bool:
        """Whether each z is in the graph, and neither x nor z was written since the call."""
        # A `forward` set on the instance may compute anything.
        return "forward" not in vars(self.module) and all(
            z.requires_grad and (writes_of(x), writes_of(z)) == versions
            for x, z, versions in zip(self.inputs, self.outputs, self.versions, strict=True)
        )


@contextmanager
def recorded_linear_layers(model: nn.Module) -> Iterator[list[LinearLayer]]:
    """Context manager that records all calls of a model's Linear layers into the yielded list."""
    layers: list[LinearLayer] = []
    known: dict[int, LinearLayer] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (isinstance(module, nn.Linear) and args and isinstance(output, Tensor)):
            return
        if transforms_are_active():  # tensors of a transform of torch.func end with it
            return
        # Skip a layer applied to its own weight: autograd has one node for both uses.
        if args[0] is module.weight or args[0] is module.bias:
            return
        if id(module) not in known:
            known[id(module)] = LinearLayer(module)
            layers.append(known[id(module)])
        known[id(module)].add(args[0], output)

    # `prepend` runs this hook before the model's own hooks, which may replace z.
    handles = [
        module.register_forward_hook(record, prepend=True)
        for module in modules_in(model)
        if type(module) is nn.Linear and module.weight.numel()
    ]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


class Factored:
    """A trusted layer: derivatives over all its calls, stacked as M rows.

    Args:
        layer: the recorded calls.
        position: the index of each trained parameter, by the parameter's id.
        ones: `ones(m, dtype=...)` returns a row [1, m] of ones, which layers may share.

    Attributes:
        outputs: the gradient edge of z of each call.
        weight: index of the weight; None if it is not trained.
        bias: index of the bias; None if it is not trained.
    """

    def __init__(
        self, layer: LinearLayer, position: dict[int, int], ones: Callable[..., Tensor]
    ) -> None:
        module = layer.module
        self.outputs = [get_gradient_edge(z) for z in layer.outputs]
        self._kinds = [(z.shape, z.dtype) for z in layer.outputs]
        self.weight = position.get(id(module.weight))
        self.bias = position.get(id(module.bias))
        rows = [x.reshape(-1, x.shape[-1]) for x in layer.inputs]
        self._rows = (rows[0] if len(rows) == 1 else torch.cat(rows)).to(module.weight.dtype)
        self._ones = ones(len(self._rows), dtype=self._rows.dtype)

    def joined(self, deltas: Sequence[Tensor | None]) -> Tensor | None:
        """δ of all calls as rows [M, out]; None if nothing depends on any call.

        Args:
            deltas: δ of each call; None if nothing depends on the call.
        """
        if all(delta is None for delta in deltas):
            return None
        rows = [
            (self._rows.new_zeros(shape) if delta is None else delta).reshape(-1, shape[-1])
            for (shape, _), delta in zip(self._kinds, deltas, strict=True)
        ]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(self._rows.dtype)

    def weight_gradient(self, delta: Tensor, place: Tensor | None = None) -> Tensor:
        """δᵀx [out, in] for δ [M, out], written to `place` if given."""
        return torch.mm(delta.t(), self._rows, out=place)

    def bias_gradient(self, delta: Tensor, place: Tensor | None = None) -> Tensor:
        """Σ δ [out] for δ [M, out], written to `place` if given."""
        return operations().sums_over_rows(delta, self._ones, place)

    def _without_zeros(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows x and a weight, without inputs that are zero in all samples, if that is faster."""
        if self._nonzero is None:
            return self._rows, weight
        columns, rows = self._nonzero
        return rows, weight.index_select(1, columns)

    @functools.cached_property
    def _nonzero(self) -> tuple[Tensor, Tensor] | None:
        """Indices of inputs that are nonzero in some row, and their x; None if nearly all are.

        Inputs that are always zero are the border of an image, unused words, dead units. They are
        left out only on a CPU, where this saves arithmetic; on a GPU it would add a kernel.
        """
        on_cpu = self._rows.device.type == "cpu" and self._rows.dtype in NUMPYS
        if not (on_cpu and operations().may_read):
            return None
        # Torch takes ten times as long as NumPy. NumPy does not know torch's lazy negation.
        columns = torch.from_numpy(np.flatnonzero(self._rows.resolve_neg().numpy().any(0)))
        if len(columns) > MOST_NONZERO * self._rows.shape[1]:
            return None
        return columns, self._rows.index_select(1, columns)

    def from_parameters(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """The tangent dz of each call, from one direction piece per parameter."""
        bias = None if self.bias is None else pieces[self.bias]
        if self.weight is not None:
            moved = _linear(*self._without_zeros(pieces[self.weight]), bias)
        else:
            assert bias is not None
            moved = bias.expand(len(self._rows), -1)
        sizes = [shape[:-1].numel() for shape, _ in self._kinds]
        return [
            dz.reshape(shape).to(dtype)
            for (shape, dtype), dz in zip(self._kinds, moved.split(sizes), strict=True)
        ]


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None or rows.is_cuda:
        return F.linear(rows, weight, bias)
    # On a CPU torch first copies the bias to every row. Adding it afterwards is faster.
    return torch.mm(rows, weight.t()).add_(bias)
