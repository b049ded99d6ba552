"""Layer normalisation whose double backward is short where it can be.

Such a layer is γx̂ + β, with x̂ the normalised x. Torch's derivative of its backward pass is made of
dozens of operations, because it has all derivatives at once. Along what comes back it is the
derivative of the layer itself: γ times the backward pass of a layer without γ, which is symmetric,
and x̂ dγ + dβ, which is the layer with other numbers in it (`products_of_norms` in
results/trials/kernels.json).
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
    """What torch's function of these arguments returns."""
    del cudnn_enable  # which torch ignores
    given = input, weight, bias, list(normalized_shape), eps, asked
    found: Tensor = _Normalized.apply(*given)  # type: ignore[no-untyped-call]
    return found


class _Normalized(torch.autograd.Function):
    """A layer whose backward pass is `_Transposed` where that will do."""

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
    """δ → its parts for x, weight and bias; None for what is not asked for."""

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
