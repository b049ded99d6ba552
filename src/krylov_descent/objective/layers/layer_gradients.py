"""Derivatives with respect to all parameters, by way of the outputs of Linear layers.

The gradients of layers are written directly to their places in one flat vector.
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

# From this many parameters on, matrix products take longer than scanning their operands.
LARGE = 1 << 16
# How many layers' tangents dz may be computed concurrently with the pass that consumes them.
AT_A_TIME = 3


class Reach:
    """The tensors that autograd differentiates with respect to, in place of the parameters.

    Args:
        network: the network whose parameters are meant.
        layers: recorded in its forward pass; unusable ones (see `layer_trust`) are left to
            autograd.
        roots: the tensors that are differentiated.

    Attributes:
        tensors: the gradient edges of the usable layers' outputs, which hold no data, followed by
            the parameters outside of these layers.

    Memory: a copy of the inputs of each layer that is called several times.
    """

    def __init__(
        self, network: Network, layers: Sequence[LinearLayer], roots: Sequence[Tensor]
    ) -> None:
        network.check_leaves(roots)
        self._parameters = network.parameters
        parameters = network.parameters.tensors
        # Modules hold the original parameters, even if the network works on aliases.
        position = {id(p): i for i, p in enumerate(network.original.parameters.tensors)}
        ones = functools.cache(partial(torch.ones, 1, device=network.parameters.device))
        self._layers = [
            Factored(layer, position, ones) for layer in usable_layers(network, roots, layers)
        ]
        covered = {i for layer in self._layers for i in (layer.weight, layer.bias)}
        self._rest = [i for i in range(len(parameters)) if i not in covered]
        # Torch's annotations do not allow a list of both tensors and gradient edges.
        self.tensors: list[Any] = [z for layer in self._layers for z in layer.outputs]
        self.tensors += [parameters[i] for i in self._rest]

    @property
    def on_cpu_and_large(self) -> bool:
        """Whether arithmetic dominates the run time: a model on a CPU with `LARGE` parameters."""
        return self._parameters.device.type == "cpu" and self._parameters.numel >= LARGE

    def gradients(self, losses: Tensor) -> list[Tensor | None]:
        """∂ Σ losses / ∂p for each parameter; None if the losses do not depend on it."""
        require_graph(losses)
        room = self.room()
        ones = operations().ones(losses)
        found = torch.autograd.grad(losses, self.tensors, ones, allow_unused=True)
        return self.to_parameters(found, room)

    def room(self) -> "Room":
        """Allocate the vector for `to_parameters`; call it before the cotangents are computed.

        Writing gradients directly into the vector saves a copy of n numbers. There is no vector if
        operations need tensors that are aligned in memory.
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
        """Map cotangents of `tensors` to cotangents of the parameters, one per parameter.

        Args:
            cotangents: one per tensor of `tensors`; None if nothing depends on it.
            room: where to write the results, from `room()`.

        Returns:
            `Pieces` of the room's vector if there is one and no cotangent is None; else a list.
        """
        pieces: list[Tensor | None] = [None] * len(self._parameters.tensors)
        start, deltas = 0, list[tuple[Factored, Tensor]]()
        for layer in self._layers:
            delta = layer.joined(cotangents[start : (start := start + len(layer.outputs))])
            if delta is not None:
                deltas.append((layer, delta))
        # Gradients of weights first: those of biases are short and fit beside them.
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
        """Map a direction in the parameters, one piece each, to the tangents of `tensors`."""
        jobs = [partial(layer.from_parameters, pieces) for layer in self._layers]
        # The pass that starts at the first layer need not wait for the other tangents.
        others = operations().begin(jobs[1:], AT_A_TIME)
        moved = [dz for of_layer in (*(job() for job in jobs[:1]), *others) for dz in of_layer]
        return moved + [pieces[i] for i in self._rest]


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for the derivatives with respect to the parameters.

    Attributes:
        vector: for all derivatives [n]; None if each one gets a tensor of its own.
        places: the view of `vector` for each parameter; None if there is no vector.
    """

    vector: Tensor | None
    places: Sequence[Tensor | None]


def losses_and_reach(network: Network, batch: Batch) -> tuple[Tensor, Reach]:
    """The losses of a batch [size] in the autograd graph, and the `Reach` of their gradients."""
    with recorded_linear_layers(network.eager) as layers:
        losses = network.sample_losses(batch, eager=True)
    return losses, Reach(network, layers, [losses])


def losses_and_gradients(network: Network, batch: Batch) -> tuple[Tensor, list[Tensor | None]]:
    """The losses of a batch [size], and ∂ Σ losses / ∂p for each parameter."""
    losses, reach = losses_and_reach(network, batch)
    return losses.detach(), reach.gradients(losses)


def _written(cotangent: Tensor | None, place: Tensor | None) -> Tensor | None:
    """The cotangent, copied to its place if there is one."""
    return cotangent if cotangent is None or place is None else place.copy_(cotangent)
