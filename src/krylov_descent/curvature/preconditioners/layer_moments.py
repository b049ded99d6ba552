"""Second moments of the inputs x of Linear layers, and of the cotangents δ of their outputs.

The backward pass for δ starts at the model's outputs with a random sample of the loss's curvature
there (`output_root`), and not with the gradient of the loss.
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

# The most inputs or outputs of a layer with factors. For more (a vocabulary, say) the factors would
# take too much memory.
LARGEST_FACTOR = 8192


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """A Linear layer that has factors.

    Attributes:
        name: the name of the module.
        weight: the index of its weight among the parameters.
        bias: the index of its bias; None if there is no bias to train.
        inputs: the number of inputs, and one more for the bias.
        outputs: the number of outputs.
    """

    name: str
    weight: int
    bias: int | None
    inputs: int
    outputs: int

    @property
    def numbers(self) -> int:
        """The numbers of this layer in `Sums.moments`: both factors, and the number of rows."""
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
    """The Linear layers that have factors; `network.trusted_layers` must be known."""
    return [place for place in linear_places(network) if place.name in network.trusted_layers]


class Sums(NamedTuple):
    """Sums over one batch.

    Attributes:
        moments: Σ xxᵀ, Σ δδᵀ and the number of rows of each layer, flat; zeros for a layer that has
            no factors in the graph of the batch.
        left_out: names of layers that the batch goes through, but that have no factors in its graph
            (see `layer_trust`).
    """

    moments: Tensor
    left_out: set[str]


def sums_of(network: Network, batch: Batch, places: list[LinearPlace], form: Form) -> Sums:
    """Sum the moments of these layers over a batch, by one forward and one backward pass.

    Args:
        network: the model.
        batch: the samples.
        places: the layers.
        form: the form of H_E (see `output_root`).
    """
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
    """Σ xxᵀ, Σ δδᵀ and the number of rows of one layer, flat, in the dtype of its weight."""
    dtype = layer.module.weight.dtype
    x = torch.cat([x.reshape(-1, x.shape[-1]) for x in layer.inputs]).to(dtype)
    delta = torch.cat([d.reshape(-1, d.shape[-1]) for d in deltas]).to(dtype)
    if place.bias is not None:
        x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    return torch.cat(
        [(x.t() @ x).reshape(-1), (delta.t() @ delta).reshape(-1), x.new_full((1,), len(x))]
    )


def means_of(sums: Tensor, place: LinearPlace, normaliser: Tensor) -> tuple[Tensor, Tensor]:
    """A as a mean over rows, and G as a mean over samples; the sums are overwritten.

    If a layer is called several times for a sample, the contributions of the calls to G add up.
    """
    of_inputs, of_outputs, rows = sums.split([place.inputs**2, place.outputs**2, 1])
    return (
        of_inputs.div_(rows.clamp(min=1)).view(place.inputs, place.inputs),
        of_outputs.div_(normaliser).view(place.outputs, place.outputs),
    )
