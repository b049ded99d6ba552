"""Which derivatives of a backward pass are asked for.

Autograd tells an operation only which of them could be.
"""

from dataclasses import dataclass
from typing import Any

from krylov_descent.runtime.private import will_be_computed


@dataclass(slots=True)
class AskedDerivatives:
    """Of backward passes through what some forward passes have computed.

    Attributes:
        known: False while the forward passes go on, which may differentiate by themselves, in
            any way that torch has: until then its own operations are to be used for that.
        only_linear: the derivative along what backward passes are linear in, and no other, so that
            nothing need be kept for others.
    """

    known: bool = False
    only_linear: bool = False


def is_asked_for(edge: tuple[Any, int]) -> bool:
    """Whether the backward pass that is under way goes there; torch's own operations ask this, too.

    `needs_input_grad` tells whether any could.
    """
    node, _ = edge
    return node is not None and will_be_computed(node)
