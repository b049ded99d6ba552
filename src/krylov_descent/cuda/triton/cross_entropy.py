"""The cross entropy of sigmoids, where its kernels are ours: what autoencoders of pixels have."""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton.entry import under_way


def sample_cross_entropy(outputs: Any, targets: Any, *, averaged: bool = False) -> Tensor | None:
    """Of each sample [size], summed over its outputs; None where it is torch's to compute.

    Args:
        outputs: before the sigmoid [size, …].
        targets: like them.
        averaged: over outputs, in place of the sum.
    """
    products = under_way()
    if products is None or not products.entropies.may_be_cross_entropy(outputs, targets):
        return None
    share = 1 / outputs.shape[1] if averaged else 1.0
    differentiated = outputs.requires_grad and torch.is_grad_enabled()
    found: Tensor = _CrossEntropy.apply(outputs, targets, share, differentiated)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, targets: Tensor, share: float, differentiated: bool
    ) -> Tensor:
        losses: Tensor
        losses, delta = under_way().entropies.cross_entropy(
            outputs, targets, share, differentiated=differentiated
        )
        ctx.share = share
        ctx.save_for_backward(outputs, targets, delta)
        return losses

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor, None, None, None]:
        outputs, targets, delta = ctx.saved_tensors
        products = under_way()
        if products is None or torch.is_grad_enabled():  # to be differentiated again
            factors = factors if ctx.share == 1 else ctx.share * factors
            found = factors.unsqueeze(1) * (outputs.sigmoid() - targets)
        elif products.entropies.are_ones(factors):
            found = delta
        else:
            found = products.entropies.cross_entropy_backward(outputs, targets, ctx.share, factors)
        return found, None, None, None
