"""Walks through the autograd graph of a forward pass: what it uses, and what it looks like.

A walk reads the edges of the graph and no numbers. Its cost is about a microsecond an edge.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from krylov_descent.objective.layers.linear_layers import LinearLayer
from krylov_descent.runtime.private import leaf_of

# A node of the autograd graph, for which torch has no public class with these attributes.
Node = Any


def layers_used_elsewhere(roots: Sequence[Tensor], layers: Sequence[LinearLayer]) -> set[int]:
    """Which layers have a weight or bias that the roots reach by a way around the layer's outputs.

    For all other layers ∂roots/∂W is δᵀx. A penalty on the weight, the weight in a function or in
    another layer, and a derivative that the forward pass takes through the layer are ways around.

    Args:
        roots: what derivatives are taken of.
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
    for node, child in edges(roots):
        entered = own.get(child)
        if entered is not None:
            used |= entered - own.get(node, nothing) - heads.get(node, nothing)
    return used


def edges(roots: Sequence[Tensor]) -> Iterator[tuple[Node | None, Node]]:
    """All edges (node, child) of the graph of the roots, each once, in a fixed order.

    The node is None for an edge that leads to a root, which may be a parameter.
    """
    # By its edge: a leaf has no grad_fn.
    nodes = [get_gradient_edge(root).node for root in roots if root.requires_grad]
    yield from ((None, node) for node in nodes)
    yield from _edges(nodes)


def leaves(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors at which the graph of the roots ends, once for each use."""
    for _, child in edges(roots):
        leaf = leaf_of(child)
        if leaf is not None:
            yield leaf


def structure(roots: Sequence[Tensor], parameters: Sequence[Tensor]) -> int:
    """A hash of all operations in the graph of the roots, and of which parameters they use.

    Graphs of two forward passes that decide alike have the same one. It knows no numbers, and it
    differs between two processes.
    """
    position = {id(p): i for i, p in enumerate(parameters)}
    numbers: dict[Node, int] = {}
    found: list[Any] = []
    for node, child in edges(roots):
        leaf = leaf_of(child)
        place = None if leaf is None else position.get(id(leaf))
        # A node gets its number when it is first seen, as a child.
        number = numbers.setdefault(child, len(numbers))
        found.append((numbers.get(node), number, child.name(), place))
    return hash(tuple(found))


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
