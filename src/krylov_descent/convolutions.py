"""Convolutions whose double backward computes what is asked for, by the kernels of a backward pass.

Torch's derivative of a convolution's backward pass computes those towards input and weight with the
one towards what comes back, asked for or not, as convolutions over whole batches, for which no
library is made. A Gauss-Newton product asks for the last alone, and took twice as long on a CPU
(`products_of_convolutions` in results/trials/kernels.json). Each of them is a convolution, or one
of the two transposed ones that a backward pass has.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.asked_derivatives import AskedDerivatives, is_asked_for


def forward(module: Any, asked: AskedDerivatives, input: Tensor) -> Tensor | None:
    """The forward pass of a convolution's module; None where it is not a plain one."""
    weight = module.weight
    if module.padding_mode != "zeros" or isinstance(module.padding, str):
        return None
    if input.dim() != weight.dim():
        return None
    geometry = _Geometry(module.stride, module.padding, module.dilation, module.groups)
    found: Tensor = _Convolved.apply(input, weight, module.bias, geometry, asked)  # type: ignore[no-untyped-call]
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
        asked: AskedDerivatives,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.asked = of, asked
        return of.convolve(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.asked.only_linear:
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
        of, (to_gradient, to_x, to_weight) = ctx.geometry, map(is_asked_for, ctx.next_functions)
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
