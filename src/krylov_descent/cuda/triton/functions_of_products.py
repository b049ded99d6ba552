"""Functions of products as they pass by: made with the product, which is never written then.

Sums with a product wait as it does. Of other matrices a function is made together with its halves.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.layouts import is_rows, rows_of
from krylov_descent.cuda.triton.lazy_products import Pending
from krylov_descent.cuda.triton.matrix_cache import Bounds, Knowledge
from krylov_descent.cuda.triton.split_fp16 import BOUNDED_BY_ONE, Function
from krylov_descent.runtime.precision import SETTINGS

aten = torch.ops.aten
# Of a matrix with fewer numbers, unless it is a product that waits, a function is torch's.
LEAST_NUMBERS = 1 << 12
FUNCTIONS: dict[Any, int] = {
    aten.sigmoid.default: kernels.SIGMOID,
    aten.tanh.default: kernels.TANH,
    aten.relu.default: kernels.RELU,
    aten.sigmoid_backward.default: kernels.SIGMOID_BACKWARD,
    aten.tanh_backward.default: kernels.TANH_BACKWARD,
    aten.threshold_backward.default: kernels.RELU_BACKWARD,
}
BACKWARD = (kernels.SIGMOID_BACKWARD, kernels.TANH_BACKWARD, kernels.RELU_BACKWARD)
# Those that have a bound before their argument, a product, is known.
OF_PRODUCTS = {
    kernels.SIGMOID: Function(kernels.SIGMOID),
    kernels.TANH: Function(kernels.TANH),
    kernels.SIGMOID_BACKWARD: Function(kernels.MULTIPLE, multiple=(0.0, 1.0, -1.0), steepest=0.25),
    kernels.TANH_BACKWARD: Function(kernels.MULTIPLE, multiple=(1.0, 0.0, -1.0)),
    kernels.RELU_BACKWARD: Function(kernels.MULTIPLE, multiple=(1.0, 0.0, 0.0), if_positive=True),
}


class FunctionsOfProducts:
    """Sums, multiples, and the functions between layers, in place of torch's.

    Args:
        device: the GPU.
        known: what is known of matrices.
        bounds: room for those of others.
        pending: what is still to be made.
    """

    def __init__(
        self, device: torch.device, known: Knowledge, bounds: Bounds, pending: Pending
    ) -> None:
        self._device, self._known, self._bounds, self._pending = device, known, bounds, pending

    def add(self, a: Any, b: Any, **factors: Any) -> Any:
        """a + b, which may wait with the product that one of them is."""
        for one, other in ((a, b), (b, a)):
            waiting, bound = self._pending.waits(one), self._bound_of(other)
            if waiting is None or bound is None or factors or a.shape != b.shape:
                continue
            if waiting.product.added is None and self._pending.waits(other) is None:
                waiting.used = True
                return self._pending.wait(replace(waiting.product, added=other, bound_added=bound))
        return aten.add.Tensor(*self._pending.all_settled(a, b), **factors)

    def mul(self, a: Any, b: Any) -> Any:
        """a ∘ b, made with the product that one of them is."""
        for one, other in ((a, b), (b, a)):
            waiting = self._pending.waits(one)
            if (
                waiting is None
                or not isinstance(other, Tensor)
                or self._pending.waits(other) is not None
            ):
                continue
            self._pending.settled(other)  # which may be a part of what waits
            fits = is_rows(other, self._device) and other.shape == one.shape
            if waiting.product.bounded and fits:
                bound = self._pending.bound_of(rows_of(other))
                found = self._pending.function_of(waiting, Function(kernels.MULTIPLE, other, bound))
                if found is not None:
                    return found
        return aten.mul.Tensor(*self._pending.all_settled(a, b))

    def function(self, function: Any, kind: int, *args: Any) -> Any:
        """One of `FUNCTIONS`, made with the product that its argument is, or with its own halves.

        Args:
            function: torch's.
            kind: which one it is in `kernels`.
            args: as torch has them.
        """
        x = args[0]
        y: Tensor = args[1] if kind in BACKWARD else x
        from_zero = args[2:] in ((), (0,))  # of relu
        fits = is_rows(y, self._device) and y.shape == x.shape and from_zero
        waiting = self._pending.waits(x)
        if waiting is not None and fits and kind in OF_PRODUCTS:
            if y is not x:
                self._pending.settled(y)
            other = None if y is x else y
            of_product = replace(OF_PRODUCTS[kind], y=other, bound_y=self._bounds.one)
            found = self._pending.function_of(waiting, of_product)
            if found is not None:
                return found
        self._pending.all_settled(x, y)
        bound: Tensor | None = None
        if is_rows(x, self._device) and x.numel() >= LEAST_NUMBERS and halves.fits(rows_of(x)):
            bound = self._bounds.one if kind in BOUNDED_BY_ONE else self._bound_of(x)
        if bound is None or not fits:
            return function(*args)
        out, three = torch.empty_like(x), SETTINGS.fp32_precision == "none"
        made = halves.split(rows_of(x), bound, kind, y, out, three=three)
        self._known.remember(rows_of(out), halves=made, bound=made.bound)
        return out

    def _bound_of(self, x: Any) -> Tensor | None:
        found: Tensor | None = None
        if isinstance(x, Tensor) and is_rows(x, self._device):
            found = self._known.recall(rows_of(x), "bound")
        return found
