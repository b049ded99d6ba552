"""Linear layers from outside: what goes in (x), what comes out (z), what comes back (δ).

A Linear layer's parameters have an influence only through z = xWᵀ + b. So derivatives are taken
with respect to z (see `layer_gradients`), and the way between z and the parameters is gone here:

    to the parameters     ∂W = δᵀx,  ∂b = Σ δ
    from the parameters   dz = x dWᵀ + db

That is one matrix product for all calls of a layer (a recurrent net calls it at every time step),
where autograd has several for each call and adds them up.
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
from krylov_descent.runtime.private import modules_in, writes_of

# To leave out inputs that are always zero costs a copy of a weight, and of x once.
MOST_NONZERO = 0.9
NUMPYS = (torch.float32, torch.float64)


@dataclass(slots=True)
class LinearLayer:
    """The calls of one Linear layer in one forward pass.

    Attributes:
        module: the layer.
        inputs: x of each call [m, …, in], out of the graph.
        outputs: z of each call [m, …, out].
        sources: the node of the graph that each x comes from; None where it comes from none.
        versions: of inputs and outputs; they change when something is computed in place.
    """

    module: nn.Linear
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)

    def add(self, x: Tensor, z: Tensor) -> None:
        """Note a call."""
        self.inputs.append(x.detach())
        self.outputs.append(z)
        self.sources.append(get_gradient_edge(x).node if x.requires_grad else None)
        self.versions.append((writes_of(x), writes_of(z)))

    def in_graph(self) -> bool:
        """Whether each z is in the graph, and is xWᵀ + b of the x and z that are here."""
        # A `forward` that replaces the class's own may compute anything.
        return "forward" not in vars(self.module) and all(
            z.requires_grad and (writes_of(x), writes_of(z)) == versions
            for x, z, versions in zip(self.inputs, self.outputs, self.versions, strict=True)
        )


@contextmanager
def recorded_linear_layers(model: nn.Module) -> Iterator[list[LinearLayer]]:
    """What goes through the Linear layers of a model, for a while."""
    layers: list[LinearLayer] = []
    known: dict[int, LinearLayer] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not (isinstance(module, nn.Linear) and args and isinstance(output, Tensor)):
            return
        # A layer applied to its own weight is left out: autograd has both uses at one node.
        if args[0] is module.weight or args[0] is module.bias:
            return
        if id(module) not in known:
            known[id(module)] = LinearLayer(module)
            layers.append(known[id(module)])
        known[id(module)].add(args[0], output)

    # Before the model's own hooks, which may return something else than z.
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
    """A trusted layer, with the places of its parameters; None for one that is not trained.

    Args:
        layer: its calls.
        position: of each parameter, by its id.
        ones: `ones(m, dtype=...)` is a row [1, m] of them, which layers may share.
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
        """δ of all calls, in rows; None where nothing depends on any of them.

        Args:
            deltas: of each call; None where nothing depends on it.
        """
        if all(delta is None for delta in deltas):
            return None
        rows = [
            (self._rows.new_zeros(shape) if delta is None else delta).reshape(-1, shape[-1])
            for (shape, _), delta in zip(self._kinds, deltas, strict=True)
        ]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).to(self._rows.dtype)

    def weight_gradient(self, delta: Tensor, place: Tensor | None = None) -> Tensor:
        """δᵀx, at a place where one is given."""
        return torch.mm(delta.t(), self._rows, out=place)

    def bias_gradient(self, delta: Tensor, place: Tensor | None = None) -> Tensor:
        """Σ δ, likewise."""
        return operations().sums_over_rows(delta, self._ones, place)

    def _without_zeros(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """X and a weight for it, without the inputs that are zero in all samples, if it pays."""
        if self._nonzero is None:
            return self._rows, weight
        columns, rows = self._nonzero
        return rows, weight.index_select(1, columns)

    @functools.cached_property
    def _nonzero(self) -> tuple[Tensor, Tensor] | None:
        """The inputs that are not zero throughout, and x of these alone; None if nearly all are.

        The border of an image, words that do not occur, units that are dead. Looked for on a CPU,
        where what is saved is less arithmetic, and not one more kernel.
        """
        on_cpu = self._rows.device.type == "cpu" and self._rows.dtype in NUMPYS
        if not (on_cpu and operations().may_read):
            return None
        # By NumPy: torch takes ten times as long. It knows no numbers that are to be negated.
        columns = torch.from_numpy(np.flatnonzero(self._rows.resolve_neg().numpy().any(0)))
        if len(columns) > MOST_NONZERO * self._rows.shape[1]:
            return None
        return columns, self._rows.index_select(1, columns)

    def from_parameters(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Dz of each call."""
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
    # On a CPU torch copies the bias to every row first; to add it afterwards takes less.
    return torch.mm(rows, weight.t()).add_(bias)
