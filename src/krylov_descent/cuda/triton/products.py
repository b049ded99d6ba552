"""The dispatch mode that sees all tensor operations while a part of a step is recorded.

The package's docstring gives an overview. The objects that execute the operations hold no reference
to the mode. So there is no reference cycle, and the mode's memory is freed without the garbage
collector.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import split_fp16
from krylov_descent.cuda.triton.cross_entropy import CrossEntropy
from krylov_descent.cuda.triton.functions_of_products import FUNCTIONS, FunctionsOfProducts
from krylov_descent.cuda.triton.lazy_products import LazyProducts
from krylov_descent.cuda.triton.matrices import Matrices
from krylov_descent.cuda.triton.matrix_cache import MatrixCache
from krylov_descent.cuda.triton.split_fp16 import is_rows, rows_of
from krylov_descent.runtime.precision import SETTINGS, forward_precision
from krylov_descent.runtime.private import DispatchMode, schema_of, transforms_are_active

aten = torch.ops.aten
PLAIN = {Tensor, torch.nn.Parameter}
# Replaced operations that need all of their arguments materialised.
READING = {aten.mm.out}


class TensorCoreProducts(DispatchMode):
    """Dispatch mode that computes products of float32 matrices by products in fp16.

    Three fp16 products give the precision of float32. One is enough if torch is set to tf32. If
    torch is set to IEEE, its own products are used.

    Args:
        device: the GPU.
        before: the mode of a recording that is always replayed before this one.
        sparing: replace only large products, and no functions; for models whose activation
            functions have no kernels here.

    Attributes:
        device, sparing: as given.
        matrices: products of matrices.
        entropies: cross entropies, and their derivatives.
    """

    def __init__(
        self,
        device: torch.device,
        before: "TensorCoreProducts | None" = None,
        *,
        sparing: bool = False,
    ) -> None:
        super().__init__()
        self.device, self.sparing = device, sparing
        earlier: MatrixCache | None = None if before is None else before._lazy.cache
        self._lazy: LazyProducts = LazyProducts(device, earlier)
        self.matrices = Matrices(self._lazy, sparing=sparing)
        self.entropies = CrossEntropy(self._lazy)
        self._replaced: dict[Any, Callable[..., Any]] = {
            aten.mm.default: self.matrices.mm,
            aten.mm.out: self.matrices.mm_out,
            aten.addmm.default: self.matrices.addmm,
        }
        if not sparing:
            functions = FunctionsOfProducts(self._lazy)
            self._replaced |= {aten.add.Tensor: functions.add, aten.mul.Tensor: functions.mul}
            for function, kind in FUNCTIONS.items():
                self._replaced[function] = partial(functions.function, function, kind)
        self._takes_lazy = self._replaced.keys() - READING

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        try:
            if problem is None:
                self.materialise(used_too=True)
        finally:
            super().__exit__(kind, problem, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Execute an operation, or the one that replaces it."""
        given = kwargs or {}
        if set(types) - PLAIN:  # tensor subclasses, whose memory is unknown
            self.materialise(used_too=True)
            if schema_of(func).is_mutable:
                self._lazy.cache.clear()
            return func(*args, **given)
        schema = schema_of(func)
        changed = list(_written(schema, args, given)) if schema.is_mutable else []
        if self._lazy:
            if changed:
                self._lazy.materialise_readers_of(changed)
            if not func.is_view and func not in self._takes_lazy:
                self._lazy.materialise(*_tensors_in((args, given)))
        found = self._replaced.get(func, func)(*args, **given)
        for tensor in changed:
            self._lazy.cache.forget(tensor)
        return found

    def prepare(
        self, matrices: Sequence[Tensor], targets: Sequence[Tensor] = ()
    ) -> list[Callable[[], Any]]:
        """Jobs that compute splits and bounds ahead of use, for tensors that the kernels support.

        Args:
            matrices: operands of products, which are split.
            targets: targets of a cross entropy, whose bounds scale the derivative.
        """
        if transforms_are_active():
            return []
        with forward_precision():
            exact = SETTINGS.fp32_precision == "none"
        split = partial(self._lazy.split_of, exact=exact)
        jobs: list[tuple[Callable[[Tensor], Any], Tensor]] = [(split, x) for x in matrices]
        jobs += [(self._find_bound, target) for target in targets]
        return [
            partial(job, rows_of(x))
            for job, x in jobs
            if is_rows(x, self.device) and split_fp16.fits(rows_of(x))
        ]

    def materialise(self, *, used_too: bool = False) -> None:
        """Compute all lazy products on this stream; see `LazyProducts.materialise_all`."""
        self._lazy.materialise_all(used_too=used_too)

    def make_ready(self, *read: Tensor | None, written: Tensor | None = None) -> None:
        """Prepare for a kernel that this mode does not see.

        Args:
            read: the tensors that it reads.
            written: the tensor that it writes to.
        """
        self._lazy.materialise(*read)
        if written is not None:
            self._lazy.materialise_readers_of([written])
            self._lazy.cache.forget(written)

    def note_made(self, result: Any) -> None:
        """Make other streams wait for this one before they read the tensors of a job's result."""
        for tensor in _tensors_in(result):
            self._lazy.note_made(tensor)

    def _find_bound(self, rows: Tensor) -> None:
        # Returns nothing: all bounds share a storage, so `note_made` would make all of them wait.
        self._lazy.bound_of(rows)


def _tensors_in(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _tensors_in(part)


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation writes to."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, list | tuple) else (given,):
                if isinstance(tensor, Tensor):
                    yield tensor
