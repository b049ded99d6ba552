"""The `Operations` in use while a part of a step is recorded.

Independent jobs run on parallel branches of the CUDA graph. `kernel_operations` has those that run
by the kernels of `cuda.triton`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from krylov_descent.cuda.graphs.parallel_branches import is_recorded, side_by_side
from krylov_descent.runtime.ops import Operations, use

Result = TypeVar("Result")


@contextmanager
def recorded_operations(products: AbstractContextManager[Any]) -> Iterator[Any]:
    """Context of a recording or its warm-up, with the operations for it.

    Args:
        products: context that yields `TensorCoreProducts` or None; this one yields the same.
    """
    with products as found, use(RecordedOperations() if found is None else _by_kernels(found)):
        yield found


def _by_kernels(products: Any) -> Operations:
    from krylov_descent.cuda.graphs import kernel_operations as kernels  # needs Triton

    kind = kernels.BasisOperations if products.sparing else kernels.TensorCoreOperations
    return kind(products)


class RecordedOperations(Operations):
    """Torch's operations, with independent jobs on parallel branches of a CUDA graph."""

    @property
    def may_read(self) -> bool:
        """Whether the host may read results: not during capture, when kernels have not run."""
        return not is_recorded()

    def independent(self, jobs: Iterable[Callable[[], Result]]) -> list[Result]:
        """Run all jobs on parallel branches."""
        return side_by_side(list(jobs))
