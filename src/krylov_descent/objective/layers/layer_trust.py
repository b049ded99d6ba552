"""Decide for which Linear layers the gradient of the weight is δᵀx (see `linear_layers`).

A layer must pass two checks:

- once per model, on a few samples: δᵀx agrees with autograd's gradient (`trusted_layers`);
- in the graph of every forward pass that is differentiated: only the layer's calls use its weight
  and bias (`usable_layers`). A model may tie or reuse a weight, penalise it or differentiate
  through it at some steps or for some samples only.

A layer that fails is left to autograd.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from krylov_descent.objective.layers.graph_walks import layers_used_elsewhere
from krylov_descent.objective.layers.linear_layers import Factored, LinearLayer
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.network import Network

# Relative tolerances. Under autocast and in tf32 autograd's own gradient has only a few digits.
FINE_TOLERANCE, COARSE_TOLERANCE = 1e-3, 3e-2
# Of the largest gradient of a layer, in units of rounding.
ROUNDINGS = 10.0


def trust_tolerance(epsilon: float) -> float:
    """The allowed relative difference of δᵀx and autograd's gradient, given machine epsilon."""
    return FINE_TOLERANCE if epsilon < FINE_TOLERANCE / 10 else COARSE_TOLERANCE


def usable_layers(
    network: Network, roots: Sequence[Tensor], layers: Sequence[LinearLayer]
) -> list[LinearLayer]:
    """The trusted layers for which ∂roots/∂W is δᵀx in this graph.

    Args:
        network: the model, possibly on aliases of its parameters.
        roots: the tensors that are differentiated.
        layers: recorded in the forward pass that computed the roots.
    """
    names = {id(module): name for name, module in network.eager.named_modules()}
    trusted = [layer for layer in layers if names.get(id(layer.module)) in network.trusted_layers]
    return used_nowhere_else(roots, trusted)


def used_nowhere_else(roots: Sequence[Tensor], layers: Sequence[LinearLayer]) -> list[LinearLayer]:
    """The layers whose parameters enter the graph of the roots only through the layer's calls."""
    there = [layer for layer in layers if layer.in_graph()]
    elsewhere = layers_used_elsewhere(roots, there)
    return [layer for i, layer in enumerate(there) if i not in elsewhere]


def trusted_layers(
    network: Network,
    losses: Tensor,
    layers: list[LinearLayer],
    exact: Sequence[Tensor | None],
    epsilon: float,
) -> frozenset[str]:
    """The names of the layers for which δᵀx agrees with autograd's gradient.

    Args:
        network: the model.
        losses: of a few samples [m], in the autograd graph.
        layers: recorded in the forward pass that computed the losses.
        exact: autograd's gradients of Σ losses, one per parameter.
        epsilon: machine epsilon of the arithmetic of `exact`.
    """
    names = {id(module): name for name, module in network.eager.named_modules()}
    position = {id(p): i for i, p in enumerate(network.parameters.tensors)}
    trained = [
        layer
        for layer in layers
        if {id(layer.module.weight), id(layer.module.bias)} & position.keys()
    ]
    candidates = used_nowhere_else([losses], trained)
    if not candidates or not losses.requires_grad:
        return frozenset()
    outputs = [z for layer in candidates for z in layer.outputs]
    deltas = torch.autograd.grad(
        losses, outputs, torch.ones_like(losses), retain_graph=True, allow_unused=True
    )
    ones = partial(torch.ones, 1, device=network.parameters.device)
    found, start = set(), 0
    for layer in candidates:
        own = deltas[start : (start := start + len(layer.outputs))]
        factored = Factored(layer, position, ones)
        delta, gradients = factored.joined(own), []
        if delta is not None and factored.weight is not None:
            gradients.append((factored.weight, factored.weight_gradient(delta)))
        if delta is not None and factored.bias is not None:
            gradients.append((factored.bias, factored.bias_gradient(delta)))
        if gradients and agrees([(computed, exact[i]) for i, computed in gradients], epsilon):
            found.add(names[id(layer.module)])
    return frozenset(found)


def agrees(pairs: Sequence[tuple[Tensor, Tensor | None]], epsilon: float) -> bool | None:
    """Whether the gradients of a layer's parameters are autograd's.

    A gradient may be zero but for rounding, as that of the bias of an attention's keys is. So
    besides its relative error, rounding of the layer's largest gradient is allowed.

    Args:
        pairs: for each parameter δᵀx, or Σ δ for a bias, and autograd's gradient; None if the
            losses do not depend on the parameter.
        epsilon: machine epsilon of the arithmetic.

    Returns:
        None if both gradients of a parameter are zero, which proves nothing about the layer.
    """
    sizes = [0.0 if exact is None else length(exact) for _, exact in pairs]
    errors = [length(found if exact is None else found - exact) for found, exact in pairs]
    if any(size == error == 0 for size, error in zip(sizes, errors, strict=True)):
        return None
    tolerance, largest = trust_tolerance(epsilon), max(sizes)
    return largest < math.inf and all(
        error <= max(tolerance * size, ROUNDINGS * epsilon * largest)
        for size, error in zip(sizes, errors, strict=True)
    )
