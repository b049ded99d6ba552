"""Layers whose double backward computes what a product asks for, and no more.

Torch's own has more for these. For most other operations it is as short as it can be.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from krylov_descent import convolutions, layer_norms
from krylov_descent.asked_derivatives import AskedDerivatives

# A layer's own numbers, with the same tensors saved in the same order, which a checkpoint goes by.
# None where it cannot be done for an input.
Forward = Callable[[Any, AskedDerivatives, Tensor], Tensor | None]
CONVOLUTIONS: dict[type[nn.Module], Forward] = dict.fromkeys(
    (nn.Conv1d, nn.Conv2d, nn.Conv3d), convolutions.forward
)
# Layer norms have nothing to spare where all derivatives are asked for. Group norms have nothing to
# spare at all: on a CPU the short form took a seventh longer.
LAYER_NORMS: dict[type[nn.Module], Forward] = {nn.LayerNorm: layer_norms.forward}


@contextmanager
def lean_layers(model: nn.Module, *, only_linear: bool = False) -> Iterator[None]:
    """For a while, forward passes have such layers.

    Args:
        model: whose layers they are.
        only_linear: backward passes that come after this while are differentiated only along what
            they are linear in. (Those within it, of forward passes that differentiate by
            themselves, may be differentiated along everything.)
    """
    asked = AskedDerivatives()
    forwards = CONVOLUTIONS | LAYER_NORMS if only_linear else CONVOLUTIONS
    replaced = [
        module
        for module in model.modules()
        if type(module) in forwards
        and "forward" not in vars(module)
        and not is_parametrized(module)
    ]
    for module in replaced:
        module.forward = partial(_forward, module, forwards[type(module)], asked)
    try:
        yield
    finally:
        asked.only_linear = only_linear
        for module in replaced:
            del module.forward


def _forward(module: nn.Module, lean: Forward, asked: AskedDerivatives, input: Tensor) -> Tensor:
    transformed = torch._C._are_functorch_transforms_active()  # by a forward pass
    found = None
    if not (transformed or torch.is_autocast_enabled(input.device.type)):
        found = lean(module, asked, input)
    own: Tensor = type(module).forward(module, input) if found is None else found
    return own
