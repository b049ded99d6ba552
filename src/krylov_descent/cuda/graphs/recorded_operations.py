"""The `Operations` in use while a part of a step is recorded.

Independent jobs run on parallel branches of the CUDA graph. With products on tensor cores some
operations have their own kernels, and fall back to torch for tensors that these do not support.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.parallel_branches import begin, is_recorded, side_by_side
from krylov_descent.runtime.ops import Operations, use

Result = TypeVar("Result")


@contextmanager
def recorded_operations(products: AbstractContextManager[Any]) -> Iterator[Any]:
    """Context of a recording or its warm-up, with the operations for it.

    Args:
        products: context that yields `TensorCoreProducts` or None; this one yields the same.
    """
    with products as found:
        by_kernels = found is not None and not found.sparing
        with use(TensorCoreOperations(found) if by_kernels else RecordedOperations()):
            yield found


class RecordedOperations(Operations):
    """Torch's operations, with independent jobs on parallel branches of a CUDA graph."""

    @property
    def may_read(self) -> bool:
        """Whether the host may read results: not during capture, when kernels have not run."""
        return not is_recorded()

    def independent(self, jobs: Iterable[Callable[[], Result]]) -> list[Result]:
        """Run all jobs on parallel branches."""
        return side_by_side(list(jobs))


class TensorCoreOperations(RecordedOperations):
    """Recorded operations by the kernels of `cuda.triton`.

    Args:
        products: the active dispatch mode `TensorCoreProducts`.
    """

    def __init__(self, products: Any) -> None:
        self._products = products

    def writes_anywhere(self, device: torch.device) -> bool:
        """True: the kernels do."""
        return True

    def begin(self, jobs: Iterable[Callable[[], Result]], at_a_time: int) -> list[Result]:
        """Run jobs on branches; operations of `TensorCoreProducts` wait for what they read."""
        return begin(list(jobs), at_a_time)

    def cross_entropy(self, outputs: Tensor, targets: Tensor, *, averaged: bool) -> Tensor:
        """By one kernel, which also writes the derivative if a gradient will follow."""
        found: Tensor | None = self._products.entropies.of_samples(
            outputs, targets, averaged=averaged
        )
        if found is None:
            return super().cross_entropy(outputs, targets, averaged=averaged)
        return found

    def ones(self, losses: Tensor) -> Tensor:
        """The cotangent for which the cross entropy has precomputed its derivative."""
        if losses.dim() != 1 or losses.dtype is not torch.float32:
            return super().ones(losses)
        found: Tensor = self._products.entropies.ones(len(losses))
        return found

    def sums_over_rows(self, x: Tensor, ones: Tensor, out: Tensor | None = None) -> Tensor:
        """By kernels that add partial sums in a fixed order."""
        found: Tensor | None = self._products.matrices.sums_over_rows(x, squares=False, out=out)
        return super().sums_over_rows(x, ones, out) if found is None else found

    def sums_over_samples(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """With squares computed from the cached splits of both matrices."""
        matrices = self._products.matrices
        squares: Tensor | None = matrices.product_of_squares(delta, x)
        sums: Tensor | None = matrices.sums_over_rows(delta, squares=True)
        if squares is None or sums is None:
            return super().sums_over_samples(x, delta)
        of_delta, of_squares = sums.chunk(2)
        return delta.t() @ x, squares, of_delta, of_squares

    @property
    def fuses(self) -> bool:
        """True: each fused operation is one kernel."""
        return True

    def scale_of_length(
        self, squared: Tensor, least: float, before: Tensor, place: Tensor
    ) -> Tensor:
        """By one kernel."""
        found: Tensor | None = self._products.basis_vectors.scale_of_length(
            squared, least, before, place
        )
        return super().scale_of_length(squared, least, before, place) if found is None else found

    def subtract_combination(
        self, w: Tensor, rows: Tensor, coefficients: Tensor, weights: Tensor
    ) -> bool:
        """By one kernel."""
        done: bool = self._products.basis_vectors.subtract_combination(
            w, rows, coefficients, weights
        )
        return done

    def subtract_rows(
        self, start: Tensor, divisor: Tensor | None, rows: Tensor, taken: Tensor, w: Tensor
    ) -> Tensor | None:
        """By one kernel."""
        found: Tensor | None = self._products.basis_vectors.subtract_rows(
            start, divisor, rows, taken, w
        )
        return found

    def scale_of_remainder(
        self,
        parts: Tensor,
        taken: Tensor,
        along: Tensor,
        least: float,
        projected: Tensor,
        place: Tensor,
    ) -> Tensor:
        """By one kernel."""
        found: Tensor = self._products.basis_vectors.scale_of_remainder(
            parts, taken, along, least, projected, place
        )
        return found
