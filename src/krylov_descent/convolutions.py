"""Convolutions whose double backward computes what is asked for, by the kernels of a backward pass.

Torch's derivative of a convolution's backward pass computes those towards input and weight with the
one towards what comes back, asked for or not, as convolutions over whole batches, for which no
library is made. A Gauss-Newton product asks for the last alone, and took twice as long on a CPU
(`products_of_convolutions` in results/trials/kernels.json). Each of them is a convolution, or one
of the two transposed ones that a backward pass has.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(slots=True)
class Convolutions:
    """Those of some forward passes.

    Attributes:
        only_linear: what is differentiated of backward passes from now on is what they are linear
            in, and nothing else need be kept for that. To be set after a forward pass, which may
            differentiate by itself.
    """

    only_linear: bool = False


@contextmanager
def differentiable_convolutions(model: nn.Module) -> Iterator[Convolutions]:
    """For a while, forward passes have convolutions with this double backward."""
    convolutions = Convolutions()
    replaced = [
        module
        for module in model.modules()
        if type(module) in CONVOLUTIONS
        and "forward" not in vars(module)
        and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and not is_parametrized(module)
    ]
    for module in replaced:
        module.forward = partial(_forward, module, convolutions)
    try:
        yield convolutions
    finally:
        for module in replaced:
            del module.forward


def _forward(module: Any, convolutions: Convolutions, input: Tensor) -> Tensor:
    """The module's own numbers, with as many tensors saved: a checkpoint counts them."""
    weight = module.weight
    transformed = torch._C._are_functorch_transforms_active()  # by a forward pass
    if transformed or input.dim() != weight.dim() or torch.is_autocast_enabled(input.device.type):
        result: Tensor = type(module).forward(module, input)
        return result
    geometry = _Geometry(module.stride, module.padding, module.dilation, module.groups)
    given = input, weight, module.bias, geometry, convolutions
    found: Tensor = _Convolved.apply(*given)  # type: ignore[no-untyped-call]
    return found


@dataclass(frozen=True, slots=True)
class _Geometry:
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        nothing = [0] * len(self.stride)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, nothing, self.groups
        )

    def transposed(self, gradient: Tensor, x: Tensor, weight: Tensor, mask: list[bool]) -> Any:
        nothing = [0] * len(self.stride)
        return torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [len(weight)],
            self.stride,
            self.padding,
            self.dilation,
            False,
            nothing,
            self.groups,
            mask,
        )


class _Convolved(torch.autograd.Function):
    """A convolution whose backward pass is `_Transposed`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        of: _Geometry,
        convolutions: Convolutions,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.convolutions = of, convolutions
        return of.convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.convolutions.only_linear:
            x, weight = x.detach(), weight.detach()
        mask = list(ctx.needs_input_grad[:3])
        found = _Transposed.apply(gradient, x, weight, ctx.geometry, mask)  # type: ignore[no-untyped-call]
        return *found, None, None


class _Transposed(torch.autograd.Function):
    """δ → its parts for x, weight and bias; None for what is not asked for."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, of: _Geometry, mask: list[bool]
    ) -> Any:
        # Towards x and weight it is that of `gradient`, which takes as much room as x.
        elsewhere = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(gradient if elsewhere else None, x, weight)
        ctx.geometry, ctx.shape = of, gradient.shape
        ctx.set_materialize_grads(False)
        return of.transposed(gradient, x, weight, mask)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None) -> Any:
        gradient, x, weight = ctx.saved_tensors
        of, (to_gradient, to_x, to_weight) = ctx.geometry, map(_is_asked_for, ctx.next_functions)
        found: list[Tensor | None] = [None, None, None]
        if to_gradient:
            parts = [of.convolve(dx, weight)] if dx is not None else []
            parts += [of.convolve(x, dweight)] if dweight is not None else []
            parts += [dbias.reshape(-1, *[1] * (x.dim() - 2))] if dbias is not None else []
            found[0] = sum(parts[1:], parts[0]).expand(ctx.shape) if parts else None
        if to_x and dweight is not None:
            found[1] = of.transposed(gradient, x, dweight, [True, False, False])[0]
        if to_weight and dx is not None:
            found[2] = of.transposed(gradient, dx, weight, [False, True, False])[1]
        return *found, None, None


def _is_asked_for(edge: tuple[Any, int]) -> bool:
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
