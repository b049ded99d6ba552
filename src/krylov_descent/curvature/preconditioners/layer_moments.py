"""Second moments of what goes into Linear layers and of what comes back to them.

What comes back, δ, starts at the outputs with a sample of the loss's curvature there
(`output_root`), and not with its gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from krylov_descent.curvature.preconditioners.output_root import Form, root_times_signs
from krylov_descent.objective.batches import Batch, floating_tensors_in
from krylov_descent.objective.layers.layer_trust import usable_layers
from krylov_descent.objective.layers.linear_layers import LinearLayer, recorded_linear_layers
from krylov_descent.objective.network import Network
from krylov_descent.runtime.ops import operations

# Of inputs or outputs; a layer with more (a vocabulary, say) has none, for want of memory.
LARGEST_FACTOR = 8192


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """A Linear layer that has factors.

    Attributes:
        name: of the module.
        weight: which of the parameters it is, [outputs, inputs].
        bias: likewise; None where there is none to train.
        inputs: how many, with one more for the bias.
        outputs: how many.
    """

    name: str
    weight: int
    bias: int | None
    inputs: int
    outputs: int

    @property
    def numbers(self) -> int:
        """Of both factors, and of rows."""
        return self.inputs**2 + self.outputs**2 + 1


def linear_places(network: Network) -> list[LinearPlace]:
    """The Linear layers that may have factors, in a fixed order."""
    position = {id(p): i for i, p in enumerate(network.parameters.tensors)}
    found = []
    for name, module in network.eager.named_modules():
        if type(module) is not nn.Linear or id(module.weight) not in position:
            continue
        bias = position.get(id(module.bias))
        inputs = module.in_features + (bias is not None)
        widest = max(module.in_features, module.out_features)
        if module.weight.numel() and widest <= LARGEST_FACTOR:
            found.append(
                LinearPlace(name, position[id(module.weight)], bias, inputs, module.out_features)
            )
    return found


def trusted_places(network: Network) -> list[LinearPlace]:
    """Those of them that have factors, once the layers to trust are known."""
    return [place for place in linear_places(network) if place.name in network.trusted_layers]


class Sums(NamedTuple):
    """Of one batch.

    Attributes:
        moments: Σ xxᵀ, Σ δδᵀ and the number of rows of each layer, flat; zeros where it has none.
        left_out: names of layers that the batch goes through, but that have no factors in its
            graph (see `layer_trust`).
    """

    moments: Tensor
    left_out: set[str]


def sums_of(network: Network, batch: Batch, places: list[LinearPlace], form: Form) -> Sums:
    """The sums of these layers over a batch."""
    with recorded_linear_layers(network.eager) as layers:
        outputs = network.outputs(batch, eager=True)
    found = floating_tensors_in(outputs)
    names = {id(module): name for name, module in network.eager.named_modules()}
    here = {place.name: place for place in places}
    usable = {names[id(layer.module)]: layer for layer in usable_layers(network, found, layers)}
    calls = {here[name]: layer for name, layer in usable.items() if name in here}
    left_out = {names[id(layer.module)] for layer in layers} - usable.keys()
    root = root_times_signs(network.output_hessian(outputs, batch), found, form)
    active = [(z, r) for z, r in zip(found, root, strict=True) if z.requires_grad]
    deltas: Iterator[Tensor] = iter(())
    if calls:
        deltas = iter(
            torch.autograd.grad(
                [z for z, _ in active],
                [z for layer in calls.values() for z in layer.outputs],
                [r for _, r in active],
                allow_unused=True,
                materialize_grads=True,
            )
        )
    jobs = [
        partial(_moments, layer, [next(deltas) for _ in layer.outputs], place)
        for place, layer in calls.items()
    ]
    moments = dict(zip(calls, operations().independent(jobs), strict=True))
    like = network.parameters.tensors[0]
    flat = torch.cat(
        [like.new_zeros(0), *(moments.get(p, like.new_zeros(p.numbers)) for p in places)]
    )
    return Sums(flat, left_out)


def _moments(layer: LinearLayer, deltas: list[Tensor], place: LinearPlace) -> Tensor:
    """Of one layer, in the dtype of its weight."""
    dtype = layer.module.weight.dtype
    x = torch.cat([x.reshape(-1, x.shape[-1]) for x in layer.inputs]).to(dtype)
    delta = torch.cat([d.reshape(-1, d.shape[-1]) for d in deltas]).to(dtype)
    if place.bias is not None:
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    return torch.cat(
        [(x.t() @ x).reshape(-1), (delta.t() @ delta).reshape(-1), x.new_full((1,), len(x))]
    )


def means_of(sums: Tensor, place: LinearPlace, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """A, a mean over rows, and G, over samples: with several calls their parts add up.

    In place of the sums.
    """
    of_inputs, of_outputs, rows = sums.split([place.inputs**2, place.outputs**2, 1])
    return (
        of_inputs.div_(rows.clamp(min=1)).view(place.inputs, place.inputs),
        of_outputs.div_(normaliser).view(place.outputs, place.outputs),
    )
