"""Which derivatives of a backward pass are asked for.

Autograd tells an operation only which of them could be.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class AskedDerivatives:
    """Of the backward passes through some forward passes.

    Attributes:
        only_linear: the derivative along what they are linear in, and no other, so that nothing
            need be kept for others. To be set after the forward passes, which may differentiate by
            themselves.
    """

    only_linear: bool = False


def is_asked_for(edge: tuple[Any, int]) -> bool:
    """Whether the backward pass that is under way goes there; torch's own operations ask this, too.

    `needs_input_grad` tells whether any could.
    """
    node, _ = edge
    if node is None:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient is asked for
        return True
