"""Convolutions whose double backward computes only the derivatives that are asked for.

The backward pass of a convolution can be differentiated towards the input, the weight and the
cotangent. Torch's double backward always computes all three derivatives, as convolutions over whole
batches, which no library is optimised for. A Gauss-Newton product asks for the derivative towards
the cotangent alone, and took twice as long on a CPU with torch's double backward
(`products_of_convolutions` in results/trials/kernels.json). Here each of the three derivatives is a
convolution, or one of the two transposed convolutions of an ordinary backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from krylov_descent.curvature.asked_derivatives import AskedDerivatives, is_asked_for


def convolve(
    asked: AskedDerivatives,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor | None:
    """Convolve, with the arguments of `torch.conv2d` after `asked`, in one to three dimensions.

    Returns None for padding that is given by name, and for an input without a batch dimension.
    """
    dimensions = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    each = partial(_each, dimensions)
    geometry = _Geometry(each(stride), each(padding), each(dilation), groups)
    found: Tensor = _Convolved.apply(input, weight, bias, geometry, asked)  # type: ignore[no-untyped-call]
    return found


def _each(dimensions: int, number: int | Sequence[int]) -> list[int]:
    """One number for each spatial dimension; torch accepts a single number for all of them."""
    numbers = [number] if isinstance(number, int) else list(number)
    return numbers * dimensions if len(numbers) == 1 else numbers


@dataclass(frozen=True, slots=True)
class _Geometry:
    stride: list[int]
    padding: list[int]
    dilation: list[int]
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
    """A convolution. Once the forward passes are over, its backward pass is `_Transposed`."""

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
        mask = list(ctx.needs_input_grad[:3])
        if not ctx.asked.known:
            return *ctx.geometry.transposed(gradient, x, weight, mask), None, None
        if ctx.asked.only_linear:
            x, weight = x.detach(), weight.detach()
        found = _Transposed.apply(gradient, x, weight, ctx.geometry, mask)  # type: ignore[no-untyped-call]
        return *found, None, None


class _Transposed(torch.autograd.Function):
    """Backward pass: cotangent δ → gradients of x, weight and bias; None where `mask` is False."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, of: _Geometry, mask: list[bool]
    ) -> Any:
        # Only derivatives towards x and weight need the cotangent, which takes as much memory as x.
        needed = any(ctx.needs_input_grad[1:3])
        ctx.save_for_backward(gradient if needed else None, x, weight)
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
