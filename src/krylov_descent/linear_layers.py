"""Linear layers from outside: what goes in (x), what comes out (z), what comes back (δ).

A Linear layer's parameters have an influence only through z = xWᵀ + b. So derivatives are taken
with respect to z, and the way between z and the parameters is gone here:

    to the parameters     ∂W = δᵀx,  ∂b = Σ δ
    from the parameters   dz = x dWᵀ + db

That is one matrix product for all calls of a layer (a recurrent net calls it at every time step),
where autograd has several for each call and adds them up.

A layer is trusted only where its calls are all that the graph of a few samples knows of its
parameters, and δᵀx is autograd's own gradient there. A weight that is tied or used elsewhere, if
only a little, is not, nor is one in a forward pass that itself differentiates.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from krylov_descent.batches import Batch
from krylov_descent.branches import Moment, Moments, begin, begin_earlier, moment, side_by_side
from krylov_descent.network import Network, require_graph
from krylov_descent.parameters import Pieces
from krylov_descent.tensor_cores.cross_entropy import ones_for
from krylov_descent.tensor_cores.entry import under_way

# Of δᵀx: under autocast and in tf32 autograd's own gradient is rounded to few digits.
FINE_TOLERANCE, COARSE_TOLERANCE = 1e-3, 3e-2

# Layers of so many units, for which a GPU has more room than they take.
NARROW = 128
# Parameters of a model whose products take longer than to look at their numbers.
LARGE = 1 << 16
# To leave out inputs that are always zero costs a copy of a weight, and of x once.
MOST_NONZERO = 0.9
NUMPYS = (torch.float32, torch.float64)
# Of the products with a direction, which a forward pass comes to one by one, so many at a time.
AT_A_TIME = 3


@dataclass(slots=True)
class LinearLayer:
    """The calls of one Linear layer in one forward pass.

    Attributes:
        module: the layer.
        inputs: x of each call [m, …, in], out of the graph.
        outputs: z of each call [m, …, out].
        versions: of the outputs; they change when an activation is computed in place.
    """

    module: nn.Linear
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def in_graph(self) -> bool:
        """Whether the outputs are in the graph, as the layer left them."""
        return all(
            z.requires_grad and z._version == version
            for z, version in zip(self.outputs, self.versions, strict=True)
        )

    def is_all_of(self, uses: Counter[int], deltas: Sequence[Tensor | None]) -> bool:
        """Whether nothing but these calls uses weight and bias.

        Args:
            uses: of each parameter in the graph of the losses, as `uses_of_parameters` counts.
            deltas: δ of each call; None where the losses do not depend on it.
        """
        calls = sum(delta is not None for delta in deltas)
        return all(uses[id(p)] <= calls for p in (self.module.weight, self.module.bias))


@contextmanager
def recorded_linear_layers(model: nn.Module) -> Iterator[list[LinearLayer]]:
    """What goes through the Linear layers of a model, for a while."""
    layers: list[LinearLayer] = []
    known: dict[int, LinearLayer] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(module, nn.Linear) and args and isinstance(output, Tensor):
            if id(module) not in known:
                known[id(module)] = LinearLayer(module)
                layers.append(known[id(module)])
            layer = known[id(module)]
            layer.inputs.append(args[0].detach())
            layer.outputs.append(output)
            layer.versions.append(output._version)

    # Before the model's own hooks, which may return something else than z.
    handles = [
        module.register_forward_hook(record, prepend=True)
        for module in model.modules()
        if type(module) is nn.Linear and module.weight.numel()
    ]
    try:
        yield layers
    finally:
        for handle in handles:
            handle.remove()


class Reach:
    """What derivatives are taken with respect to, instead of the parameters themselves.

    Args:
        network: whose parameters are meant.
        layers: of its forward pass; those that are not trusted are left to autograd.

    Attributes:
        tensors: the outputs of the trusted layers, as their places in the graph, which hold no
            numbers, and the parameters of everything else.

    Memory: where a layer is called several times, a copy of its inputs.
    """

    def __init__(self, network: Network, layers: Sequence[LinearLayer]) -> None:
        self._parameters = network.parameters
        parameters = network.parameters.tensors
        # Modules hold the original parameters, also where the network works on aliases.
        position = {id(p): i for i, p in enumerate(network.original.parameters.tensors)}
        names = {id(module): name for name, module in network.eager.named_modules()}
        ones = functools.cache(partial(torch.ones, 1, device=network.parameters.device))
        self._layers = [
            _Factored(layer, position, ones)
            for layer in layers
            if names.get(id(layer.module)) in network.trusted_layers and layer.in_graph()
        ]
        covered = {i for layer in self._layers for i in (layer.weight, layer.bias)}
        self._rest = [i for i in range(len(parameters)) if i not in covered]
        # Tensors and gradient edges; torch's annotations know lists of the one or the other.
        self.tensors: list[Any] = [z for layer in self._layers for z in layer.outputs]
        self.tensors += [parameters[i] for i in self._rest]

    @property
    def on_cpu_and_large(self) -> bool:
        """Whether arithmetic is what takes the time."""
        return self._parameters.device.type == "cpu" and self._parameters.numel >= LARGE

    def gradients(self, losses: Tensor) -> list[Tensor | None]:
        """∂ Σ losses / ∂p for each parameter; None where the losses do not depend on it."""
        require_graph(losses)
        room = self.room()
        found = torch.autograd.grad(losses, self.tensors, ones_for(losses), allow_unused=True)
        return self.to_parameters(found, room)

    def room(self) -> "Room":
        """For derivatives towards the parameters; asked for before all that they are made of.

        They are written where they belong in a vector, which saves a copy of all of it. On a GPU
        only where products are not left to torch: its kernels want pieces that begin evenly.
        """
        vector: Tensor | None = None
        places: Sequence[Tensor | None] = [None] * len(self._parameters.tensors)
        if self._parameters.device.type == "cpu" or under_way() is not None:
            vector = self._parameters.empty()
            places = self._parameters.pieces(vector)
        return Room(vector, places, moment())

    def to_parameters(
        self, cotangents: Sequence[Tensor | None], room: "Room"
    ) -> list[Tensor | None]:
        """From a derivative towards `tensors` to one towards the parameters.

        Where it is recorded, the products of a layer begin as soon as its δ is there, beside the
        rest of the backward pass.
        """
        pieces: list[Tensor | None] = [None] * len(self._parameters.tensors)
        start, deltas = 0, list[tuple[_Factored, Tensor]]()
        for layer in self._layers:
            delta = layer.joined(cotangents[start : (start := start + len(layer.outputs))])
            if delta is not None:
                deltas.append((layer, delta))
        deltas.reverse()  # from the last layer on, as a backward pass goes
        of_weights, of_biases = list[_Job](), list[_Job]()
        moments = moments_to_begin([(layer.width, delta) for layer, delta in deltas])
        for (layer, delta), made in zip(deltas, moments, strict=True):
            if layer.weight is not None:
                job = partial(layer.weight_gradient, delta, room.places[layer.weight])
                of_weights.append(_Job(layer.weight, made, job))
            if layer.bias is not None:
                job = partial(layer.bias_gradient, delta, room.places[layer.bias])
                of_biases.append(_Job(layer.bias, made, job))
        jobs = of_weights + of_biases  # which are short, and fit beside the others
        found = begin_earlier([(job.begins, job.run) for job in jobs], room.since)
        for of_job, piece in zip(jobs, found, strict=True):
            pieces[of_job.parameter] = piece
        for i, cotangent in zip(self._rest, cotangents[start:], strict=True):
            pieces[i] = _written(cotangent, room.places[i])
        if room.vector is None or any(piece is None for piece in pieces):
            return pieces
        return Pieces(room.vector, pieces)

    def from_parameters(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """From a direction in the parameters to the one that it causes in `tensors`."""
        jobs = [partial(layer.from_parameters, pieces) for layer in self._layers]
        # What goes on from the first layer need not wait for the others, where it is recorded.
        others = side_by_side(jobs[1:]) if under_way() is None else begin(jobs[1:], AT_A_TIME)
        moved = [dz for of_layer in (*(job() for job in jobs[:1]), *others) for dz in of_layer]
        return moved + [pieces[i] for i in self._rest]


class _Job(NamedTuple):
    """The gradient of one parameter, which may begin behind moments of the backward pass."""

    parameter: int
    begins: Moments
    run: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Room:
    """For derivatives towards the parameters.

    Attributes:
        vector: of all of them [n]; None where each has a place of its own.
        places: for each parameter, in that vector.
        since: the moment at which this was there.
    """

    vector: Tensor | None
    places: Sequence[Tensor | None]
    since: Moment


def losses_and_reach(network: Network, batch: Batch) -> tuple[Tensor, Reach]:
    """The losses of a batch [size], in the graph, and what has their gradients."""
    with recorded_linear_layers(network.eager) as layers:
        losses = network.sample_losses(batch, eager=True)
    return losses, Reach(network, layers)


def losses_and_gradients(network: Network, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of a batch [size], and ∂ Σ losses / ∂p for each parameter."""
    losses, reach = losses_and_reach(network, batch)
    return losses.detach(), reach.gradients(losses)


class _Factored:
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
        self.width = max(module.weight.shape)
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
        products = under_way()
        if products is not None:
            found: Tensor | None = products.sums_over_rows(delta, squares=False, out=place)
            if found is not None:
                return found
        # A product, because on a GPU torch's sum over rows takes several times as long.
        row = None if place is None else place.unsqueeze(0)
        return torch.mm(self._ones, delta, out=row).squeeze(0)

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
        if self._rows.device.type != "cpu" or self._rows.dtype not in NUMPYS:
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


def moments_to_begin(deltas: Sequence[tuple[int, Tensor | None]]) -> list[Moments]:
    """For each layer the moments behind which its gradients are made, where that is recorded.

    That is when δ was there; none where that is not known. But wide layers leave nothing of a GPU
    to their gradients, so these wait for narrow ones, too, if there are any. Not for these alone:
    where a forward pass has branches, the δ of a narrow layer may be there first.

    Args:
        deltas: width and δ of each layer, from the last one on.
    """
    products = under_way()
    if products is None:
        return [()] * len(deltas)
    made = [None if delta is None else products.when_made(delta) for _, delta in deltas]
    moments: list[Moments] = [() if event is None else (event,) for event in made]
    first = 0
    for i, (width, _) in enumerate(deltas):
        if width <= NARROW:
            for j in range(first, i):
                moments[j] = moments[j] + moments[i] if moments[j] and moments[i] else ()
            first = i + 1
    return moments


def _written(cotangent: Tensor | None, place: Tensor | None) -> Tensor | None:
    """The cotangent, at its place where there is one."""
    return cotangent if cotangent is None or place is None else place.copy_(cotangent)


def trust_tolerance(epsilon: float) -> float:
    """How far δᵀx may be from autograd's own gradient, for an arithmetic of this epsilon."""
    return FINE_TOLERANCE if epsilon < FINE_TOLERANCE / 10 else COARSE_TOLERANCE


def uses_of_parameters(losses: Tensor) -> Counter[int]:
    """How often the graph of the losses uses each parameter, by its id."""
    uses: Counter[int] = Counter()
    seen: set[Any] = set()
    nodes: list[Any] = [losses.grad_fn]
    while nodes:
        for node, _ in nodes.pop().next_functions:
            if node is None:
                continue
            if node.name() == "torch::autograd::AccumulateGrad":
                uses[id(node.variable)] += 1
            elif node not in seen:
                seen.add(node)
                nodes.append(node)
    return uses


def trusted_layers(
    network: Network,
    losses: Tensor,
    layers: list[LinearLayer],
    exact: Sequence[Tensor | None],
    epsilon: float,
) -> frozenset[str]:
    """The names of those layers whose δᵀx is autograd's own gradient.

    Args:
        network: the model.
        losses: of a few samples.
        layers: of the forward pass that gave them.
        exact: autograd's gradients of their sum.
        epsilon: of its arithmetic.
    """
    names = {id(module): name for name, module in network.eager.named_modules()}
    position = {id(p): i for i, p in enumerate(network.parameters.tensors)}
    candidates = [
        layer
        for layer in layers
        if layer.in_graph() and {id(layer.module.weight), id(layer.module.bias)} & position.keys()
    ]
    if not candidates or not losses.requires_grad:
        return frozenset()
    outputs = [z for layer in candidates for z in layer.outputs]
    deltas = torch.autograd.grad(
        losses, outputs, torch.ones_like(losses), retain_graph=True, allow_unused=True
    )
    uses, tolerance = uses_of_parameters(losses), trust_tolerance(epsilon)
    ones = partial(torch.ones, 1, device=network.parameters.device)
    found, start = set(), 0
    for layer in candidates:
        own = deltas[start : (start := start + len(layer.outputs))]
        if not layer.is_all_of(uses, own):
            continue
        factored = _Factored(layer, position, ones)
        delta, gradients = factored.joined(own), []
        if delta is not None and factored.weight is not None:
            gradients.append((factored.weight, factored.weight_gradient(delta)))
        if delta is not None and factored.bias is not None:
            gradients.append((factored.bias, factored.bias_gradient(delta)))
        # A gradient of zero proves nothing.
        if gradients and all(_agrees(gradient, exact[i], tolerance) for i, gradient in gradients):
            found.add(names[id(layer.module)])
    return frozenset(found)


def _agrees(gradient: Tensor, exact: Tensor | None, tolerance: float) -> bool:
    if exact is None:
        return False
    error, size = (gradient - exact).norm(), exact.norm()
    return bool(error <= tolerance * size) and bool(size > 0)
