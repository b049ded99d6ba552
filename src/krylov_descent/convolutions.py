"""Convolutions whose double backward computes what a product needs, and no more.

A backward pass is linear in what comes back, and Jv is the derivative of that linear map. Torch's
derivative of a convolution's backward pass has those towards input and weight with it, asked for or
not, as convolutions over whole batches: with them a Gauss-Newton product of a small CNN took twice
as long on a CPU (`products_of_convolutions` in results/trials/kernels.json).
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


@contextmanager
def linear_backward_of_convolutions(model: nn.Module) -> Iterator[None]:
    """For a while, forward passes have convolutions with the short double backward.

    Of all derivatives of the backward pass it has the one towards what comes back alone.
    """
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
        module.forward = partial(_forward, module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _forward(module: Any, input: Tensor) -> Tensor:
    """The module's own numbers, with as many tensors saved: a checkpoint counts them."""
    weight = module.weight
    if input.dim() != weight.dim() or torch.is_autocast_enabled(input.device.type):
        result: Tensor = type(module).forward(module, input)
        return result
    geometry = _Geometry(module.stride, module.padding, module.dilation, module.groups)
    found: Tensor = _Convolved.apply(input, weight, module.bias, geometry)  # type: ignore[no-untyped-call]
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
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, of: _Geometry) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry = of
        return of.convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = (tensor.detach() for tensor in ctx.saved_tensors)
        mask = list(ctx.needs_input_grad[:3])
        found = _Transposed.apply(gradient, x, weight, ctx.geometry, mask)  # type: ignore[no-untyped-call]
        return *found, None


class _Transposed(torch.autograd.Function):
    """δ → its parts for x, weight and bias; None for what is not asked for."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, of: _Geometry, mask: list[bool]
    ) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.geometry = of
        ctx.set_materialize_grads(False)
        return of.transposed(gradient, x, weight, mask)

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> Any:
        x, weight = ctx.saved_tensors
        dx, dweight, dbias = given
        parts = []
        if dx is not None:
            parts.append(ctx.geometry.convolve(dx, weight))
        if dweight is not None:
            parts.append(ctx.geometry.convolve(x, dweight))
        total = sum(parts[1:], parts[0]) if parts else None
        if dbias is not None:
            column = dbias.reshape(-1, *[1] * (x.dim() - 2))
            total = column if total is None else total + column
        return total, None, None, None, None
