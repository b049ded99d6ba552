"""The cross entropy of sigmoids, the loss of autoencoders of pixels, by one kernel.

If a gradient will follow, the kernel also writes the derivative of the sum of all losses, and the
split of the derivative. A backward pass whose cotangent is `ones` returns this derivative. Other
backward passes use torch's operations. `Operations.cross_entropy` is the reference in torch.
"""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton.entry import under_way
from krylov_descent.cuda.triton.launching import launch
from krylov_descent.cuda.triton.lazy_products import LazyProducts
from krylov_descent.cuda.triton.split_fp16 import SplitMatrix, filled_up, fits, is_rows
from krylov_descent.runtime.precision import derivative_precision
from krylov_descent.runtime.private import transforms_are_active

# Entries of a row that are processed in parallel.
BLOCK = 1024


class CrossEntropy:
    """Cross entropies of sigmoids, and their derivatives in the logits.

    Args:
        lazy: the lazy products of the recording.
    """

    def __init__(self, lazy: LazyProducts) -> None:
        self._lazy, self._one = lazy, lazy.bounds.one

    def of_samples(self, outputs: Any, targets: Any, *, averaged: bool) -> Tensor | None:
        """The differentiable loss of each sample [m]; None if the kernel does not support these.

        Args:
            outputs: logits [m, n].
            targets: [m, n].
            averaged: whether to average over n instead of summing.
        """
        ours = (
            isinstance(outputs, Tensor)
            and outputs.dim() == 2
            and is_rows(outputs, self._lazy.device)
            and is_rows(targets, self._lazy.device)
            and outputs.shape == targets.shape
            and not targets.requires_grad
            and not transforms_are_active()
            and fits(outputs)
        )
        if not ours:
            return None
        share = 1 / outputs.shape[1] if averaged else 1.0
        differentiated = outputs.requires_grad and torch.is_grad_enabled()
        found: Tensor = _CrossEntropy.apply(outputs, targets, share, differentiated)  # type: ignore[no-untyped-call]
        return found

    def compute(
        self, x: Tensor, target: Tensor, share: float, *, differentiated: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The losses [m] and, if differentiated, the derivative of their sum [m, n]."""
        self._lazy.materialise(x, target)
        x, target = x.detach(), target.detach()
        (rows, columns), losses = x.shape, x.new_empty(len(x))
        unit = 4 if columns % 4 == 0 else 1  # width of vectorised loads
        delta, made, bound_of_target = x, None, x
        programs, width, tensors = rows, filled_up(columns), (x,) * 4
        if differentiated:
            exact = derivative_precision() == "none"
            bound = torch.empty_like(self._one)
            made = SplitMatrix.empty(x, rows, columns, exact=exact, bound=bound)
            delta, bound_of_target = torch.empty_like(x), self._lazy.bound_of(target)
            programs, tensors = len(made.high), (*made.parts, made.unscale, bound)
        with_low = made is not None and made.low is not None
        numbers = rows, columns // unit, width, share, int(with_low)
        args = x, target, losses, delta, *tensors, bound_of_target, *numbers
        launch(kernels.cross_entropy, (programs, 1), args, (differentiated, unit, BLOCK))
        if made is None:
            return losses, None
        self._lazy.cache.remember(delta, split=made)
        return losses, delta

    def ones(self, count: int) -> Tensor:
        """Ones [count] without a kernel, which `are_ones` recognises."""
        return self._one.view(torch.float32).expand(count)

    def are_ones(self, x: Tensor) -> bool:
        """Whether x was returned by `ones`."""
        return x.data_ptr() == self._one.data_ptr() and x.stride() == (0,)


class _CrossEntropy(torch.autograd.Function):
    # Backward may run in another thread, or after the mode was left. So forward and backward each
    # look up the active mode.

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, targets: Tensor, share: float, differentiated: bool
    ) -> Tensor:
        losses: Tensor
        losses, delta = under_way().entropies.compute(
            outputs, targets, share, differentiated=differentiated
        )
        ctx.share = share
        ctx.save_for_backward(outputs, targets, delta)
        return losses

    @staticmethod
    def backward(ctx: Any, factors: Tensor) -> tuple[Tensor, None, None, None]:
        outputs, targets, delta = ctx.saved_tensors
        products, again = under_way(), torch.is_grad_enabled()
        if products is not None and not again and products.entropies.are_ones(factors):
            return delta, None, None, None
        factors = factors if ctx.share == 1 else ctx.share * factors
        return factors.unsqueeze(1) * (outputs.sigmoid() - targets), None, None, None
