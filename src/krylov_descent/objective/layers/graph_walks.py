"""Traversals of the autograd graph of a forward pass: the leaves it uses, and its structure.

A traversal reads the edges of the graph and no tensor data. It takes about a microsecond per edge.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from krylov_descent.objective.layers.linear_layers import LinearLayer
from krylov_descent.runtime.private import leaf_of

# A node of the autograd graph. Torch has no public class with the attributes used here.
Node = Any


def layers_used_elsewhere(roots: Sequence[Tensor], layers: Sequence[LinearLayer]) -> set[int]:
    """The layers whose weight or bias affects the roots other than through the layer's outputs.

    For all other layers ∂roots/∂W is δᵀx. Examples of other uses are a penalty on the weight, the
    weight in a function or in another layer, and a derivative that the forward pass takes through
    the layer.

    Args:
        roots: the tensors that are differentiated.
        layers: recorded in the forward pass that computed the roots, with outputs in the graph.

    Returns:
        Indices of layers.
    """
    # The nodes between z and x of a call, down to weight and bias, belong to the call. An edge into
    # one of them is another use, unless it comes from z or from a node of the call. Counting the
    # uses of a parameter is not enough: a derivative through the layer enters at Wᵀ, a node of the
    # call.
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

    For each root, which may be a parameter, there is an edge (None, node of the root).
    """
    # From the gradient edge, because a leaf has no grad_fn.
    nodes = [get_gradient_edge(root).node for root in roots if root.requires_grad]
    yield from ((None, node) for node in nodes)
    yield from _edges(nodes)


def leaves(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors of the graph of the roots, once for each use."""
    for _, child in edges(roots):
        leaf = leaf_of(child)
        if leaf is not None:
            yield leaf


def structure(roots: Sequence[Tensor], parameters: Sequence[Tensor]) -> int:
    """A hash of the operations in the graph of the roots and of the parameters they use.

    Two forward passes that take the same branches have the same hash, whatever the tensor values.
    The hash differs between processes.
    """
    position = {id(p): i for i, p in enumerate(parameters)}
    numbers: dict[Node, int] = {}
    found: list[Any] = []
    for node, child in edges(roots):
        leaf = leaf_of(child)
        place = None if leaf is None else position.get(id(leaf))
        # Nodes are numbered in the order in which they are first seen as a child.
        number = numbers.setdefault(child, len(numbers))
        found.append((numbers.get(node), number, child.name(), place))
    return hash(tuple(found))


def _edges(nodes: Sequence[Node], end: Node | None = None) -> Iterator[tuple[Node, Node]]:
    """All edges (node, child) reachable from `nodes`, without those that lead to `end`."""
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
