"""Layer normalisation with a short double backward for curvature products.

A layer norm is γx̂ + β, with x̂ the normalised x. Torch's double backward consists of dozens of
operations, because it computes all derivatives at once. The derivative along the cotangent alone is
the forward derivative of the layer. It has two parts. One is γ times the backward pass of a layer
norm without γ, which is symmetric. The other is x̂ dγ + dβ, a layer norm with other weights
(`products_of_norms` in results/trials/kernels.json).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from krylov_descent.curvature.asked_derivatives import AskedDerivatives

aten = torch.ops.aten


def normalize(
    asked: AskedDerivatives,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Layer normalisation, with the arguments of `torch.layer_norm` after `asked`."""
    del cudnn_enable  # torch ignores it, too
    given = input, weight, bias, list(normalized_shape), eps, asked
    found: Tensor = _Normalized.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _Normalized(torch.autograd.Function):
    """A layer norm. Its backward pass is `_Transposed` if only linear derivatives are asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: list[int],
        epsilon: float,
        asked: AskedDerivatives,
    ) -> Tensor:
        found: Tensor
        found, mean, rate = torch.native_layer_norm(x, shape, weight, bias, epsilon)
        ctx.save_for_backward(bias, x, weight, mean, rate)
        ctx.shape, ctx.epsilon, ctx.asked = shape, epsilon, asked
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        bias, x, weight, mean, rate = ctx.saved_tensors
        mask = list(ctx.needs_input_grad[:3])
        if ctx.asked.only_linear:
            weight = None if weight is None else weight.detach()
            given = gradient, x.detach(), ctx.shape, mean, rate, weight, bias, mask, ctx.epsilon
            found = _Transposed.apply(*given)  # type: ignore[no-untyped-call]
        else:
            found = aten.native_layer_norm_backward(
                gradient, x, ctx.shape, mean, rate, weight, bias, mask
            )
        return *found, None, None, None


class _Transposed(torch.autograd.Function):
    """Backward pass: cotangent δ → gradients of x, weight and bias; None where `mask` is False."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        x: Tensor,
        shape: list[int],
        mean: Tensor,
        rate: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mask: list[bool],
        epsilon: float,
    ) -> Any:
        ctx.save_for_backward(x, mean, rate, weight)
        ctx.shape, ctx.epsilon = shape, epsilon
        ctx.set_materialize_grads(False)
        return aten.native_layer_norm_backward(gradient, x, shape, mean, rate, weight, bias, mask)

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dweight: Tensor | None, dbias: Tensor | None) -> Any:
        x, mean, rate, weight = ctx.saved_tensors
        parts = []
        if dx is not None:
            moved = aten.native_layer_norm_backward(
                dx, x, ctx.shape, mean, rate, None, None, [True, False, False]
            )[0]
            parts.append(moved if weight is None else moved * weight)
        if dweight is not None:
            parts.append(torch.layer_norm(x, ctx.shape, dweight, dbias, ctx.epsilon))
        elif dbias is not None:
            parts.append(dbias.expand_as(x))
        found = sum(parts[1:], parts[0]) if parts else None
        return found, *[None] * 8
