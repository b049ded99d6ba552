"""Products of float32 matrices that run on tensor cores, wherever in a forward or backward pass.

While a part of a step is recorded, every operation on tensors passes by here. What a recording
holds are kernels, so it costs nothing afterwards that they were chosen in Python.

A product needs both matrices as `Halves`. These are made once for a matrix that is used several
times (a weight going forward and back, an input for values and for weight gradients), and by the
kernel that computes the matrix, where it is one of those that are known: sigmoid and its like.

A product waits until it is known what is made of it. If that is a sum or such a function, one
kernel makes everything, and the product itself is never written. Whatever else looks at it has it
made first (`pending`).

What passes by is handed on, to `matrices`, `functions_of_products` or `long_vectors`;
`entropy_derivatives` is asked by the loss. None of them knows the mode itself: as soon as nobody
has use for it, its memory is free, and no collector of garbage has to find it first.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.cross_entropy import CrossEntropy
from krylov_descent.cuda.triton.functions_of_products import FUNCTIONS, FunctionsOfProducts
from krylov_descent.cuda.triton.layouts import is_rows, rows_of
from krylov_descent.cuda.triton.lazy_products import Pending
from krylov_descent.cuda.triton.long_vectors import LongVectors
from krylov_descent.cuda.triton.matrices import Matrices
from krylov_descent.cuda.triton.matrix_cache import Bounds, Knowledge
from krylov_descent.runtime.precision import SETTINGS, forward_precision
from krylov_descent.runtime.private import DispatchMode, schema_of, transforms_are_active

aten = torch.ops.aten
PLAIN = {Tensor, torch.nn.Parameter}

# Of the operations that are ours, those that want all their arguments made.
LOOKING = {
    aten.mm.out,
    aten.addmv.default,
    aten.addmv_.default,
}


class TensorCoreProducts(DispatchMode):
    """For a while, products of float32 matrices on this device are made of products in fp16.

    Of three, with the digits of float32, or of one where torch is told to have tf32; but not where
    it is told to follow IEEE.

    Args:
        device: the GPU.
        before: what was recorded before this, and is always replayed before it.
        sparing: of large products alone, and without other functions: for a model with functions
            between its layers that are not known here.

    Attributes:
        matrices: what is done with those.
        long_vectors: likewise, such as the rows of a basis.
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
        self._device, self.sparing = device, sparing
        earlier: Knowledge | None = None if before is None else before._known
        self._known: Knowledge = Knowledge(device, earlier)
        self._bounds = Bounds(device)
        self._pending = Pending(device, self._known, self._bounds)
        self.long_vectors = LongVectors(device, self._known, self._pending)
        self.matrices = Matrices(device, self._pending, self.long_vectors, sparing=sparing)
        self.entropies = CrossEntropy(device, self._known, self._bounds, self._pending)
        self._ours: dict[Any, Callable[..., Any]] = {
            aten.mm.default: self.matrices.mm,
            aten.mm.out: self.matrices.mm_out,
            aten.addmm.default: self.matrices.addmm,
            aten.mv.default: self.long_vectors.mv,
            aten.addmv.default: self.long_vectors.addmv,
            aten.addmv_.default: self.long_vectors.addmv_,
        }
        if not sparing:
            functions = FunctionsOfProducts(device, self._known, self._bounds, self._pending)
            self._ours |= {
                aten.add.Tensor: functions.add,
                aten.mul.Tensor: functions.mul,
            }
            for function, kind in FUNCTIONS.items():
                self._ours[function] = partial(functions.function, function, kind)
        self._may_wait = self._ours.keys() - LOOKING

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        try:
            if problem is None:
                self.settle(used_too=True)
        finally:
            super().__exit__(kind, problem, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called in place of all operations on tensors."""
        given, schema = kwargs or {}, schema_of(func)
        if set(types) - PLAIN:  # tensors of other classes, of whose memory nothing is known
            self.settle(used_too=True)
            if schema.is_mutable:
                self._known.clear()
            return func(*args, **given)
        changed = list(_written(schema, args, given)) if schema.is_mutable else []
        if self._pending:
            if changed:
                self._pending.settle_readers_of(changed)
            if not func.is_view and func not in self._may_wait:
                self._pending.all_settled(*_tensors_in((args, given)))
        found = self._ours.get(func, func)(*args, **given)
        for tensor in changed:
            self._known.forget(tensor)
        return found

    def prepare(
        self, matrices: Sequence[Tensor], targets: Sequence[Tensor] = ()
    ) -> list[Callable[[], Any]]:
        """Jobs for what would be waited for later, where the kernels are for these.

        Args:
            matrices: to multiply with; their halves.
            targets: of a cross entropy; their bounds, which its derivative is scaled by.
        """
        if transforms_are_active():
            return []
        with forward_precision():
            three = SETTINGS.fp32_precision == "none"
        of_matrix = partial(self._pending.halves_of, three=three)
        jobs: list[tuple[Callable[[Tensor], Any], Tensor]] = [(of_matrix, x) for x in matrices]
        jobs += [(self._find_bound, target) for target in targets]
        return [
            partial(job, rows_of(x))
            for job, x in jobs
            if is_rows(x, self._device) and halves.fits(rows_of(x))
        ]

    def settle(self, *, used_too: bool = False) -> None:
        """Make all that waits, on this stream; see `Pending`."""
        self._pending.settle(used_too=used_too)

    def note_made(self, result: Any) -> None:
        """Of a job on a stream that is not waited for: whoever looks at its tensors waits then."""
        for tensor in _tensors_in(result):
            self._pending.note_made(tensor)

    def _find_bound(self, rows: Tensor) -> None:
        """Have it known, and no more: whoever has use for it waits for it then."""
        self._pending.bound_of(rows)


def _tensors_in(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _tensors_in(part)


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, list | tuple) else (given,):
                if isinstance(tensor, Tensor):
                    yield tensor
