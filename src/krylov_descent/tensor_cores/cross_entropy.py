"""The cross entropy of sigmoids, where its kernels are ours: what autoencoders of pixels have."""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.tensor_cores.entry import under_way


def sample_cross_entropy(outputs: Any, targets: Any) -> Tensor | None:
    """Of each sample [size], summed over its outputs; None where it is torch's to compute.

    Args:
        outputs: before the sigmoid [size, …].
        targets: like them.
    """
    products = under_way()
    if products is None or not products.may_be_cross_entropy(outputs, targets):
        return None
    found: Tensor = _CrossEntropy.apply(outputs, targets)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(outputs, targets)
        found: Tensor = under_way().cross_entropy(outputs, targets)
        return found

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor, None]:
        outputs, targets = ctx.saved_tensors
        products = under_way()
        if products is None or torch.is_grad_enabled():  # to be differentiated again
            return factors.unsqueeze(1) * (outputs.sigmoid() - targets), None
        return products.cross_entropy_backward(outputs, targets, factors), None
