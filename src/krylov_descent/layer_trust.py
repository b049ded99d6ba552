"""Which Linear layers are what they seem from outside (see `linear_layers`).

A layer is trusted only where its calls are all that the graph of a few samples knows of its
parameters, and δᵀx is autograd's own gradient there. A weight that is tied or used elsewhere, if
only a little, is not, nor is one in a forward pass that itself differentiates.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from krylov_descent.linear_layers import Factored, LinearLayer
from krylov_descent.loss_scale import length
from krylov_descent.network import Network

# Of δᵀx: under autocast and in tf32 autograd's own gradient is rounded to few digits.
FINE_TOLERANCE, COARSE_TOLERANCE = 1e-3, 3e-2


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
        factored = Factored(layer, position, ones)
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
    size = length(exact)
    return 0 < size < math.inf and length(gradient - exact) <= tolerance * size
