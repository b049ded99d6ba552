"""Functions whose double backward computes what a curvature product asks for, and no more.

Torch's double backward of convolutions and layer norms computes more. For most other functions
torch's double backward has nothing to spare.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from krylov_descent.curvature import convolutions, layer_norms
from krylov_descent.curvature.asked_derivatives import AskedDerivatives
from krylov_descent.runtime.private import transforms_are_active

# Returns the values of a torch function, or None where it has no rule for the arguments. It saves
# the tensors that torch saves in the same order, because checkpointing relies on this order.
Lean = Callable[..., Tensor | None]
CONVOLUTIONS: dict[Any, Lean] = dict.fromkeys(
    (torch.conv1d, torch.conv2d, torch.conv3d), convolutions.convolve
)
# For linear derivatives only: with all derivatives the lean layer norm has no advantage. Group
# norms have no lean form at all: on a CPU a product with it took 10 and 20% longer.
LAYER_NORMS: dict[Any, Lean] = dict.fromkeys(
    (torch.layer_norm, functional.layer_norm), layer_norms.normalize
)


class LeanFunctions(TorchFunctionMode):
    """A context manager in which the forward passes of this thread use the lean functions.

    Args:
        only_linear: whether backward passes after this context are differentiated only along the
            cotangent, in which they are linear. (Within the context a forward pass may itself
            differentiate, along everything.)
    """

    def __init__(self, *, only_linear: bool = False) -> None:
        super().__init__()
        self._asked, self._only_linear = AskedDerivatives(), only_linear
        self._lean = CONVOLUTIONS | LAYER_NORMS if only_linear else CONVOLUTIONS

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        self._asked.known, self._asked.only_linear = True, self._only_linear

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called in place of every torch function on tensors."""
        lean, kwargs = self._lean.get(func), kwargs or {}
        found = None
        if lean is not None and _are_plain([*args, *kwargs.values()]):
            found = lean(self._asked, *args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _are_plain(given: list[Any]) -> bool:
    """Whether the tensors are plain, of one dtype, outside autocast, forward AD and torch.func."""
    tensors = [value for value in given if isinstance(value, Tensor)]
    plain = all(
        type(tensor) in (Tensor, nn.Parameter)
        and not (tensor.is_meta or tensor.is_complex())
        and unpack_dual(tensor).tangent is None
        for tensor in tensors
    )
    return (
        plain
        and len({tensor.dtype for tensor in tensors}) == 1
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and not transforms_are_active()
    )
