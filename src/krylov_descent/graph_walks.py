"""Walks through the autograd graph of a forward pass: what it uses, and what it looks like.

A walk reads the edges of the graph and no numbers. Its cost is about a microsecond an edge.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from krylov_descent.linear_layers import LinearLayer

ACCUMULATE = "torch::autograd::AccumulateGrad"

# A node of the autograd graph, for which torch has no public class with these attributes.
Node = Any


def layers_used_elsewhere(roots: Sequence[Tensor], layers: Sequence[LinearLayer]) -> set[int]:
    """Which layers have a weight or bias that the roots reach by a way around the layer's outputs.

    For all other layers ∂roots/∂W is δᵀx. A penalty on the weight, the weight in a function or in
    another layer, and a derivative that the forward pass takes through the layer are ways around.

    Args:
        roots: what derivatives are taken of; those without a graph are ignored.
        layers: of the forward pass that gave the roots, with outputs in the graph.

    Returns:
        Indices of layers.
    """
    # Between z and x of a call are the nodes of the call itself, down to weight and bias. Any edge
    # that leads into them, other than to z and from among them, is another use. Uses cannot just be
    # counted at the parameters: a derivative through the layer enters at Wᵀ, a node of the call.
    own: dict[Node, set[int]] = {}
    heads: dict[Node, set[int]] = {}
    for index, layer in enumerate(layers):
        for z, source in zip(layer.outputs, layer.sources, strict=True):
            heads.setdefault(z.grad_fn, set()).add(index)
            for _, node in _edges([z.grad_fn], end=source):
                own.setdefault(node, set()).add(index)
    used: set[int] = set()
    nothing: set[int] = set()
    for node, child in _edges(_nodes_of(roots)):
        entered = own.get(child)
        if entered is not None:
            used |= entered - own.get(node, nothing) - heads.get(node, nothing)
    return used


def leaves(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors at which the graph of the roots ends, once for each use."""
    for _, child in _edges(_nodes_of(roots)):
        if child.name() == ACCUMULATE:
            yield child.variable


def structure(roots: Sequence[Tensor], parameters: Sequence[Tensor]) -> int:
    """A hash of all operations in the graph of the roots, and of which parameters they use.

    Graphs of two forward passes that decide alike have the same one. It knows no numbers, and it
    differs between two processes.
    """
    position = {id(p): i for i, p in enumerate(parameters)}
    numbers: dict[Node, int] = {}
    found: list[Any] = []
    for node, child in _edges(_nodes_of(roots)):
        found.append((numbers.setdefault(node, len(numbers)), node.name()))
        leaf = position.get(id(child.variable)) if child.name() == ACCUMULATE else None
        found.append((numbers.setdefault(child, len(numbers)), leaf))
    return hash(tuple(found))


def _nodes_of(roots: Sequence[Tensor]) -> list[Node]:
    return [root.grad_fn for root in roots if root.grad_fn is not None]


def _edges(nodes: Sequence[Node], end: Node | None = None) -> Iterator[tuple[Node, Node]]:
    """All edges (node, child) from these nodes on, but for those that lead to the end."""
    left = list(dict.fromkeys(nodes))
    seen = set(left)
    while left:
        node = left.pop()
        for child, _ in node.next_functions:
            if child is None or child is end:
                continue
            yield node, child
            if child not in seen:
                seen.add(child)
                left.append(child)
