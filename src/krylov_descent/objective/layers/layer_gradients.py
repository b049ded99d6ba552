"""Derivatives by way of the outputs of Linear layers, from and to all parameters of a network.

Gradients of layers are written where they belong in a vector.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch
from krylov_descent.objective.layers.layer_trust import usable_layers
from krylov_descent.objective.layers.linear_layers import (
    Factored,
    LinearLayer,
    recorded_linear_layers,
)
from krylov_descent.objective.network import Network, require_graph
from krylov_descent.objective.parameters import Pieces
from krylov_descent.runtime.ops import operations

# Parameters of a model whose products take longer than to look at their numbers.
LARGE = 1 << 16
# Of the products with a direction, which a forward pass comes to one by one, so many at a time.
AT_A_TIME = 3


class Reach:
    """What derivatives are taken with respect to, instead of the parameters themselves.

    Args:
        network: whose parameters are meant.
        layers: of its forward pass; those that cannot be used (see `layer_trust`) are left to
            autograd.
        roots: what derivatives are taken of.

    Attributes:
        tensors: the outputs of the usable layers, as their places in the graph, which hold no
            numbers, and the parameters of everything else.

    Memory: where a layer is called several times, a copy of its inputs.
    """

    def __init__(
        self, network: Network, layers: Sequence[LinearLayer], roots: Sequence[Tensor]
    ) -> None:
        network.check_leaves(roots)
        self._parameters = network.parameters
        parameters = network.parameters.tensors
        # Modules hold the original parameters, also where the network works on aliases.
        position = {id(p): i for i, p in enumerate(network.original.parameters.tensors)}
        ones = functools.cache(partial(torch.ones, 1, device=network.parameters.device))
        self._layers = [
            Factored(layer, position, ones) for layer in usable_layers(network, roots, layers)
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
        ones = operations().ones(losses)
        found = torch.autograd.grad(losses, self.tensors, ones, allow_unused=True)
        return self.to_parameters(found, room)

    def room(self) -> "Room":
        """For derivatives towards the parameters; asked for before all that they are made of.

        They are written where they belong in a vector, which saves a copy of all of it; but not
        where operations want tensors that begin evenly in memory.
        """
        vector: Tensor | None = None
        places: Sequence[Tensor | None] = [None] * len(self._parameters.tensors)
        if operations().writes_anywhere(self._parameters.device):
            vector = self._parameters.empty()
            places = self._parameters.pieces(vector)
        return Room(vector, places)

    def to_parameters(
        self, cotangents: Sequence[Tensor | None], room: "Room"
    ) -> list[Tensor | None]:
        """From a derivative towards `tensors` to one towards the parameters."""
        pieces: list[Tensor | None] = [None] * len(self._parameters.tensors)
        start, deltas = 0, list[tuple[Factored, Tensor]]()
        for layer in self._layers:
            delta = layer.joined(cotangents[start : (start := start + len(layer.outputs))])
            if delta is not None:
                deltas.append((layer, delta))
        # Those of weights first: the others are short, and fit beside them.
        places, jobs = list[int](), list[Callable[[], Tensor]]()
        for layer, delta in reversed(deltas):
            if layer.weight is not None:
                places.append(layer.weight)
                jobs.append(partial(layer.weight_gradient, delta, room.places[layer.weight]))
        for layer, delta in reversed(deltas):
            if layer.bias is not None:
                places.append(layer.bias)
                jobs.append(partial(layer.bias_gradient, delta, room.places[layer.bias]))
        for i, piece in zip(places, operations().independent(jobs), strict=True):
            pieces[i] = piece
        for i, cotangent in zip(self._rest, cotangents[start:], strict=True):
            pieces[i] = _written(cotangent, room.places[i])
        if room.vector is None or any(piece is None for piece in pieces):
            return pieces
        return Pieces(room.vector, pieces)

    def from_parameters(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """From a direction in the parameters to the one that it causes in `tensors`."""
        jobs = [partial(layer.from_parameters, pieces) for layer in self._layers]
        # What goes on from the first layer need not wait for the others.
        others = operations().begin(jobs[1:], AT_A_TIME)
        moved = [dz for of_layer in (*(job() for job in jobs[:1]), *others) for dz in of_layer]
        return moved + [pieces[i] for i in self._rest]


@dataclass(frozen=True, slots=True)
class Room:
    """For derivatives towards the parameters.

    Attributes:
        vector: of all of them [n]; None where each has a place of its own.
        places: for each parameter, in that vector.
    """

    vector: Tensor | None
    places: Sequence[Tensor | None]


def losses_and_reach(network: Network, batch: Batch) -> tuple[Tensor, Reach]:
    """The losses of a batch [size], in the graph, and what has their gradients."""
    with recorded_linear_layers(network.eager) as layers:
        losses = network.sample_losses(batch, eager=True)
    return losses, Reach(network, layers, [losses])


def losses_and_gradients(network: Network, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of a batch [size], and ∂ Σ losses / ∂p for each parameter."""
    losses, reach = losses_and_reach(network, batch)
    return losses.detach(), reach.gradients(losses)


def _written(cotangent: Tensor | None, place: Tensor | None) -> Tensor | None:
    """The cotangent, at its place where there is one."""
    return cotangent if cotangent is None or place is None else place.copy_(cotangent)
