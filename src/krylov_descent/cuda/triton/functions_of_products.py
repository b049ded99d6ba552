"""Sums, multiples and activation functions of products, fused into the kernel of the product.

For matrices that are not lazy products, one kernel computes the function and its split.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels, split_fp16
from krylov_descent.cuda.triton.lazy_products import LazyProducts
from krylov_descent.cuda.triton.split_fp16 import BOUNDED_BY_ONE, Function, is_rows, rows_of
from krylov_descent.runtime.precision import SETTINGS

aten = torch.ops.aten
# For a matrix with fewer entries that is not a lazy product, torch computes the function.
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
# Functions whose bound is known before their argument, a product, is computed.
OF_PRODUCTS = {
    kernels.SIGMOID: Function(kernels.SIGMOID),
    kernels.TANH: Function(kernels.TANH),
    kernels.SIGMOID_BACKWARD: Function(kernels.MULTIPLE, multiple=(0.0, 1.0, -1.0), steepest=0.25),
    kernels.TANH_BACKWARD: Function(kernels.MULTIPLE, multiple=(1.0, 0.0, -1.0)),
    kernels.RELU_BACKWARD: Function(kernels.MULTIPLE, multiple=(1.0, 0.0, 0.0), if_positive=True),
}


class FunctionsOfProducts:
    """Replaces torch's add, mul and activation functions.

    Args:
        lazy: the lazy products of the recording.
    """

    def __init__(self, lazy: LazyProducts) -> None:
        self._device, self._cache, self._bounds = lazy.device, lazy.cache, lazy.bounds
        self._lazy = lazy

    def add(self, a: Any, b: Any, **factors: Any) -> Any:
        """a + b; lazy if a or b is a lazy product."""
        for one, other in ((a, b), (b, a)):
            lazy, bound = self._lazy.find(one), self._bound_of(other)
            if lazy is None or bound is None or factors or a.shape != b.shape:
                continue
            if lazy.product.added is None and self._lazy.find(other) is None:
                lazy.used = True
                return self._lazy.defer(replace(lazy.product, added=other, bound_added=bound))
        return aten.add.Tensor(*self._lazy.materialise(a, b), **factors)

    def mul(self, a: Any, b: Any) -> Any:
        """a ∘ b, fused into the product if a or b is a lazy product."""
        for one, other in ((a, b), (b, a)):
            lazy = self._lazy.find(one)
            if lazy is None or not isinstance(other, Tensor) or self._lazy.find(other) is not None:
                continue
            self._lazy.materialise(other)  # it may be a part of a lazy product
            if lazy.product.bounded and is_rows(other, self._device) and other.shape == one.shape:
                bound = self._lazy.bound_of(rows_of(other))
                found = self._lazy.function_of(lazy, Function(kernels.MULTIPLE, other, bound))
                if found is not None:
                    return found
        return aten.mul.Tensor(*self._lazy.materialise(a, b))

    def function(self, function: Any, kind: int, *args: Any) -> Any:
        """One of `FUNCTIONS`, fused into a lazy product or computed together with its split.

        Args:
            function: torch's operation.
            kind: number of the function in `kernels`.
            args: arguments of torch's operation.
        """
        x = args[0]
        y: Tensor = args[1] if kind in BACKWARD else x
        from_zero = args[2:] in ((), (0,))  # the threshold of relu
        fits = is_rows(y, self._device) and y.shape == x.shape and from_zero
        lazy = self._lazy.find(x)
        if lazy is not None and fits and kind in OF_PRODUCTS:
            other = None if y is x else y
            self._lazy.materialise(other)
            of_product = replace(OF_PRODUCTS[kind], y=other, bound_y=self._bounds.one)
            found = self._lazy.function_of(lazy, of_product)
            if found is not None:
                return found
        self._lazy.materialise(x, y)
        bound: Tensor | None = None
        if is_rows(x, self._device) and x.numel() >= LEAST_NUMBERS and split_fp16.fits(rows_of(x)):
            bound = self._bounds.one if kind in BOUNDED_BY_ONE else self._bound_of(x)
        if bound is None or not fits:
            return function(*args)
        out, exact = torch.empty_like(x), SETTINGS.fp32_precision == "none"
        made = split_fp16.split(rows_of(x), bound, kind, y, out, exact=exact)
        self._cache.remember(rows_of(out), split=made)
        return out

    def _bound_of(self, x: Any) -> Tensor | None:
        rows = isinstance(x, Tensor) and is_rows(x, self._device)
        return self._cache.bound_of(rows_of(x)) if rows else None
