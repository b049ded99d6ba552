"""Tells a custom autograd function which derivatives a backward pass computes.

Autograd's `needs_input_grad` tells only which derivatives some backward pass could compute.
"""

from dataclasses import dataclass
from typing import Any

from krylov_descent.runtime.private import will_be_computed


@dataclass(slots=True)
class AskedDerivatives:
    """What is known of the backward passes through some forward passes.

    Attributes:
        known: whether the forward passes are over. Until then a forward pass may itself
            differentiate, in any way that torch offers, so torch's own operations must be used.
        only_linear: whether backward passes are differentiated only along the cotangent, in which
            they are linear. If so, nothing is saved for other derivatives.
    """

    known: bool = False
    only_linear: bool = False


def is_asked_for(edge: tuple[Any, int]) -> bool:
    """Whether the running backward pass goes to this edge of the graph.

    `needs_input_grad` tells only whether some backward pass could go there. Torch's own operations
    ask the autograd engine in the same way.
    """
    node, _ = edge
    return node is not None and will_be_computed(node)
