"""The `Operations` of a recording by the kernels of `cuda.triton`; needs Triton.

Tensors that the kernels do not support are left to torch.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.parallel_branches import begin
from krylov_descent.cuda.graphs.recorded_operations import RecordedOperations
from krylov_descent.cuda.triton.products import TensorCoreProducts
from krylov_descent.cuda.triton.vectors import LongRows
from krylov_descent.runtime.ops import Span

Result = TypeVar("Result")


class BasisOperations(LongRows, RecordedOperations):
    """Operations on the rows of a basis by kernels, and all others by torch.

    Args:
        products: the active dispatch mode, which does not see these kernels.
    """

    def __init__(self, products: TensorCoreProducts) -> None:
        super().__init__(products.device)
        self._products = products

    def project(self, rows: Tensor, vector: Tensor, span: Span | None = None) -> Tensor:
        """See `LongRows`."""
        self._products.make_ready(rows, vector)
        return super().project(rows, vector, span)

    def combine(
        self,
        rows: Tensor,
        coefficients: Tensor,
        start: Tensor | None = None,
        span: Span | None = None,
    ) -> Tensor:
        """See `LongRows`."""
        self._products.make_ready(rows, coefficients, start)
        return super().combine(rows, coefficients, start, span)

    def subtract(
        self, vector: Tensor, rows: Tensor, coefficients: Tensor, span: Span | None = None
    ) -> Tensor:
        """See `LongRows`."""
        self._products.make_ready(vector, rows, coefficients, written=vector)
        return super().subtract(vector, rows, coefficients, span)

    def write_row(self, rows: Tensor, place: Tensor, vector: Tensor, scale: Tensor) -> None:
        """See `LongRows`."""
        self._products.make_ready(vector, scale, written=rows)
        super().write_row(rows, place, vector, scale)

    def gram(self, rows: Tensor, span: Span | None = None) -> Tensor:
        """See `LongRows`."""
        self._products.make_ready(rows)
        return super().gram(rows, span)


class TensorCoreOperations(BasisOperations):
    """All operations by kernels where these support the tensors, and otherwise by torch."""

    def writes_anywhere(self, device: torch.device) -> bool:
        """True: the kernels do."""
        return True

    def begin(self, jobs: Iterable[Callable[[], Result]], at_a_time: int) -> list[Result]:
        """Run jobs on branches; operations of `TensorCoreProducts` wait for what they read."""
        return begin(list(jobs), at_a_time)

    def cross_entropy(self, outputs: Tensor, targets: Tensor, *, averaged: bool) -> Tensor:
        """By one kernel, which also writes the derivative if a gradient will follow."""
        found = self._products.entropies.of_samples(outputs, targets, averaged=averaged)
        if found is None:
            return super().cross_entropy(outputs, targets, averaged=averaged)
        return found

    def ones(self, losses: Tensor) -> Tensor:
        """The cotangent for which the cross entropy has precomputed its derivative."""
        if losses.dim() != 1 or losses.dtype is not torch.float32:
            return super().ones(losses)
        return self._products.entropies.ones(len(losses))

    def sums_over_rows(self, x: Tensor, ones: Tensor, out: Tensor | None = None) -> Tensor:
        """By kernels that add partial sums in a fixed order."""
        self._products.make_ready(written=out)
        found = self._products.matrices.sums_over_rows(x, squares=False, out=out)
        return super().sums_over_rows(x, ones, out) if found is None else found

    def sums_over_samples(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With squares computed from the cached splits of both matrices."""
        matrices = self._products.matrices
        squares = matrices.product_of_squares(delta, x)
        sums = matrices.sums_over_rows(delta, squares=True)
        if squares is None or sums is None:
            return super().sums_over_samples(x, delta)
        of_delta, of_squares = sums.chunk(2)
        return delta.t() @ x, squares, of_delta, of_squares
