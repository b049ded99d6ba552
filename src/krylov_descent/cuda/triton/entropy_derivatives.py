"""Cross entropies as they pass by, and their derivatives with what products need of them.

`entropies` has the kernel. Here it is given room for halves and bounds, and these are known
afterwards. Where a gradient will follow, the derivative is made together with the values.
"""

from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import entropies
from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.entropies import Delta
from krylov_descent.cuda.triton.layouts import is_rows
from krylov_descent.cuda.triton.lazy_products import Pending
from krylov_descent.cuda.triton.matrix_cache import Bounds, Knowledge
from krylov_descent.runtime.precision import SETTINGS, derivative_precision
from krylov_descent.runtime.private import transforms_are_active


class EntropyDerivatives:
    """Cross entropies of sigmoids, and their derivatives towards what goes into these.

    Args:
        device: the GPU.
        known: what is known of matrices.
        bounds: room for those of factors.
        pending: what is still to be made.
    """

    def __init__(
        self, device: torch.device, known: Knowledge, bounds: Bounds, pending: Pending
    ) -> None:
        self._device, self._known, self._bounds, self._pending = device, known, bounds, pending

    def may_be_cross_entropy(self, x: Any, target: Tensor) -> bool:
        """Whether `cross_entropy` is for these."""
        return (
            isinstance(x, Tensor)
            and is_rows(x, self._device)
            and x.dim() == 2
            and is_rows(target, self._device)
            and x.shape == target.shape
            and not target.requires_grad
            and not transforms_are_active()
            and halves.fits(x)
        )

    def cross_entropy(
        self, x: Tensor, target: Tensor, share: float, *, differentiated: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Of each row a share, between the sigmoid of x and the target; torch has six kernels.

        Where it is to be differentiated, also the derivative of their sum towards x, which is of
        use if all factors of the rows turn out to be `ones`.
        """
        self._pending.all_settled(x, target)
        x, target, losses = x.detach(), target.detach(), x.new_empty(len(x))
        if not differentiated:
            entropies.cross_entropy(x, target, share, losses=losses)
            return losses, None
        three = derivative_precision() == "none"
        delta = self._delta_of_entropy(x, target, self.ones(len(x)), self._bounds.one, three=three)
        entropies.cross_entropy(x, target, share, losses=losses, delta=delta)
        self._known.remember(delta.values, halves=delta.halves, bound=delta.halves.bound)
        return losses, delta.values

    def cross_entropy_backward(
        self, x: Tensor, target: Tensor, share: float, factors: Tensor
    ) -> Tensor:
        """The derivative towards x, with a factor for each row; torch has five kernels for that."""
        self._pending.all_settled(x, factors)
        x, target, factors = x.detach(), target.detach(), factors.detach().contiguous()
        largest, three = self._bounds.some(), SETTINGS.fp32_precision == "none"
        halves.find_bound(factors.unsqueeze(0), largest)
        delta = self._delta_of_entropy(x, target, factors, largest, three=three)
        entropies.cross_entropy(x, target, share, delta=delta)
        self._known.remember(delta.values, halves=delta.halves, bound=delta.halves.bound)
        return delta.values

    def ones(self, count: int) -> Tensor:
        """So many of them [count], which no kernel has to fill, and `are_ones` knows."""
        return self._bounds.one.view(torch.float32).expand(count)

    def are_ones(self, x: Tensor) -> bool:
        """Whether these are known to be `ones`."""
        return x.data_ptr() == self._bounds.one.data_ptr() and x.stride() == (0,)

    def _delta_of_entropy(
        self, x: Tensor, target: Tensor, factors: Tensor, bound: Tensor, *, three: bool
    ) -> Delta:
        """Room for a derivative, given the bound of its factors."""
        room = halves.empty_halves(x, *x.shape, three=three, bound=torch.empty_like(bound))
        of_target = self._pending.bound_of(target)
        return Delta(torch.empty_like(x), room, factors, bound, of_target)
