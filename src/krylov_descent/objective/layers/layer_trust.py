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
    tolerance = trust_tolerance(epsilon)
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
        if gradients and all(agrees(gradient, exact[i], tolerance) for i, gradient in gradients):
            found.add(names[id(layer.module)])
    return frozenset(found)


def agrees(gradient: Tensor, exact: Tensor | None, tolerance: float) -> bool | None:
    """Whether a layer's gradient is autograd's, to a relative tolerance.

    Args:
        gradient: δᵀx, or Σ δ for a bias.
        exact: autograd's gradient; None if the losses do not depend on the parameter.
        tolerance: see `trust_tolerance`.

    Returns:
        None if both gradients are zero, which proves nothing about the layer.
    """
    size = 0.0 if exact is None else length(exact)
    error = length(gradient if exact is None else gradient - exact)
    if size == error == 0:
        return None
    return size < math.inf and error <= tolerance * size
