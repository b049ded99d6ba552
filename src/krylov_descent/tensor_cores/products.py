"""Products of float32 matrices that run on tensor cores, wherever in a forward or backward pass.

While a part of a step is recorded, every operation on tensors passes by here. What a recording
holds are kernels, so it costs nothing afterwards that they were chosen in Python.

A product needs both matrices as `Halves`. These are made once for a matrix that is used several
times (a weight going forward and back, an input for values and for weight gradients), and by the
function that computes the matrix, where it is one of those that are known: sigmoid and its like.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from krylov_descent.precision import SETTINGS
from krylov_descent.tensor_cores import halves, kernels
from krylov_descent.tensor_cores.halves import Halves

aten = torch.ops.aten
# Fewer multiplications than this are as fast elsewhere; longer sums are none of a layer's (all
# inner products between the rows of a basis, say).
LEAST_WORK, LONGEST_SUM = 1 << 15, 1 << 17
# The same where each product has to make its halves by itself, which takes up to four kernels.
LEAST_WORK_ALONE = 1 << 27
LEAST_NUMBERS = 1 << 12
# A combination of so many rows at most, each of so many numbers at least, is one of a basis.
MOST_ROWS, LEAST_COLUMNS = 256, 1 << 16
BOUNDS = 1 << 14
# Of so many pieces of memory something is known before those that are gone are looked for.
FEWEST_MEMORIES = 32

FUNCTIONS: dict[Any, int] = {
    aten.sigmoid.default: kernels.SIGMOID,
    aten.tanh.default: kernels.TANH,
    aten.relu.default: kernels.RELU,
    aten.sigmoid_backward.default: kernels.SIGMOID_BACKWARD,
    aten.tanh_backward.default: kernels.TANH_BACKWARD,
    aten.threshold_backward.default: kernels.RELU_BACKWARD,
}
BOUNDED_BY_ONE = (kernels.SIGMOID, kernels.TANH)
BACKWARD = (kernels.SIGMOID_BACKWARD, kernels.TANH_BACKWARD, kernels.RELU_BACKWARD)

# One or two, each [1]: the largest absolute value of a matrix is not above their sum.
Bounds = tuple[Tensor, ...]
Key = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Known:
    """Something that is known of a matrix.

    Attributes:
        what: its halves, or its bounds.
        stream: on which that was found.
        found: there, after it.
    """

    what: Any
    stream: torch.cuda.Stream
    found: torch.cuda.Event


@dataclass(frozen=True, slots=True)
class _Memory:
    """What is known of the matrices in a piece of memory, as long as it lives and does not change.

    Attributes:
        storage: the piece; while this is held, no other one has its number.
        halves: of a matrix, by where it lies.
        bounds: likewise.
    """

    storage: StorageWeakRef
    halves: dict[Key, _Known] = field(default_factory=dict)
    bounds: dict[Key, _Known] = field(default_factory=dict)


class TensorCoreProducts(TorchDispatchMode):
    """For a while, products of float32 matrices on this device are made of products in fp16.

    Of three, with the digits of float32, or of one where torch is told to have tf32; but not where
    it is told to follow IEEE.

    Args:
        device: the GPU.
        before: what was recorded before this, and is always replayed before it.
        sparing: of large products alone, and without other functions: for a model with functions
            between its layers that are not known here.
    """

    def __init__(
        self,
        device: torch.device,
        before: "TensorCoreProducts | None" = None,
        *,
        sparing: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._before, self.sparing = device, before, sparing
        # All at once: a recording sets them back to zero with a kernel before everything else. The
        # first stays zero, and the second is one.
        self._room = torch.zeros(BOUNDS, dtype=torch.int32, device=device)
        self._zero, self._one, self._used = self._room[:1], self._room[1:2], 2
        self._one.view(torch.float32).fill_(1)
        self._memories: dict[int, _Memory] = {}
        self._most_memories = FEWEST_MEMORIES
        self._changed: dict[int, StorageWeakRef] = {}  # since what was recorded before
        self._ours: dict[Any, Callable[..., Any]] = {
            aten.mm.default: self._mm,
            aten.mm.out: self._mm_out,
            aten.addmm.default: self._addmm,
            aten.mv.default: self._mv,
            aten.addmv_.default: self._addmv_,
        }
        if not sparing:
            self._ours |= {
                aten.add.Tensor: self._add,
                aten.pow.Tensor_Scalar: self._pow,
                aten.binary_cross_entropy_with_logits.default: self._cross_entropy,
            }
            for function, kind in FUNCTIONS.items():
                self._ours[function] = partial(self._function, function, kind)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep the compiler out of this it would be loaded, which takes a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called in place of all operations on tensors."""
        given = kwargs or {}
        if types:  # tensors of other classes, of whose memory nothing is known
            if func._schema.is_mutable:
                self._memories.clear()
                self._before = None
            return func(*args, **given)
        found = self._ours.get(func, func)(*args, **given)
        if func._schema.is_mutable:
            for tensor in _written(func._schema, args, given):
                self._forget(tensor)
        return found

    def prepare(self, matrices: Sequence[Tensor]) -> list[Callable[[], Any]]:
        """Jobs that make the halves of these, where they are matrices to multiply with."""
        if torch._C._are_functorch_transforms_active():
            return []
        return [
            partial(self._halves_of, matrix)
            for matrix in matrices
            if matrix.dim() == 2 and self._is_rows(matrix) and halves.fits(matrix)
        ]

    # Operations -----------------------------------------------------------------------------

    def _mm(self, a: Tensor, b: Tensor) -> Any:
        found = self._product(a, b)
        return aten.mm.default(a, b) if found is None else found

    def _mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        fits = self._is_rows(out) and out.shape == (a.shape[0], b.shape[1])
        found = self._product(a, b, out=out) if fits else None
        return aten.mm.out(a, b, out=out) if found is None else found

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Any:
        plain = not factors and self._is_ours(bias) and bias.is_contiguous()
        found = self._product(a, b, bias) if plain and bias.shape == b.shape[1:] else None
        return aten.addmm.default(bias, a, b, **factors) if found is None else found

    def _mv(self, a: Tensor, x: Tensor) -> Any:
        if self._is_combination(a, x):
            return halves.combine(a.t(), x)
        return aten.mv.default(a, x)

    def _addmv_(self, y: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Any:
        sign = factors.get("alpha", 1)
        plain = set(factors) <= {"alpha"} and sign in (1, -1) and y.is_contiguous()
        if plain and self._is_ours(y) and y.shape == a.shape[:1] and self._is_combination(a, x):
            return halves.combine(a.t(), x, y, int(sign))
        return aten.addmv_.default(y, a, x, **factors)

    def _add(self, a: Any, b: Any, **factors: Any) -> Any:
        found = aten.add.Tensor(a, b, **factors)
        bounds = self._bounds_of(a), self._bounds_of(b)
        if not factors and None not in bounds and a.shape == b.shape:
            both: Bounds = sum(bounds, ())  # type: ignore[arg-type]
            if len(both) <= 2 and self._is_rows(found):
                self._remember(_rows_of(found), bounds=both)
        return found

    def _pow(self, x: Tensor, exponent: Any) -> Any:
        if exponent == 2:
            return self._function(aten.pow.Tensor_Scalar, kernels.SQUARE, x, exponent)
        return aten.pow.Tensor_Scalar(x, exponent)

    def _cross_entropy(self, x: Tensor, target: Tensor, *options: Any) -> Any:
        """Of each number: torch has five kernels for that."""
        plain = options == (None, None, torch.nn._reduction.get_enum("none"))
        if plain and self._is_rows(x) and self._is_rows(target) and x.shape == target.shape:
            return halves.cross_entropy(x, target)
        return aten.binary_cross_entropy_with_logits.default(x, target, *options)

    def _function(self, function: Any, kind: int, *args: Any) -> Any:
        x = args[0]
        y: Tensor = args[1] if kind in BACKWARD else x
        bounds: Bounds | None = None
        if self._is_rows(x) and x.numel() >= LEAST_NUMBERS and halves.fits(_rows_of(x)):
            bounds = (self._one,) if kind in BOUNDED_BY_ONE else self._bounds_of(x)
        fits = self._is_rows(y) and y.shape == x.shape and args[2:] in ((), (0,))  # of relu: from 0
        if bounds is None or not fits:
            return function(*args)
        out = torch.empty_like(x)
        found = self._split(_rows_of(x), bounds, kind, y, out)
        self._remember(_rows_of(out), halves=found)
        if kind != kernels.SQUARE:
            self._remember(_rows_of(out), bounds=bounds)
        return out

    # Products -------------------------------------------------------------------------------

    def _product(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """a [M, K] times b [K, N] plus bias [N]; None where it is better made elsewhere."""
        precision, least = SETTINGS.fp32_precision, LEAST_WORK
        if self.sparing:
            precision, least = "ieee" if precision == "tf32" else precision, LEAST_WORK_ALONE
        if precision not in ("none", "tf32") or not (self._is_ours(a) and self._is_ours(b)):
            return None
        if not a.dim() == b.dim() == 2 or a.shape[1] != b.shape[0]:
            return None  # torch says what is wrong
        (m, k), n = a.shape, b.shape[1]
        if m * n * k < least or min(m, n) < 2 or k > LONGEST_SUM or m * n > halves.LARGEST:
            return None
        a_along, b_along = a.stride(1) == 1, b.stride(0) == 1
        rows_of_a, rows_of_b = a if a_along else a.t(), b.t() if b_along else b
        if not all(_has_rows(rows) and halves.fits(rows) for rows in (rows_of_a, rows_of_b)):
            return None
        # A weight gradient is the last of its kind: nothing is multiplied with it.
        bound = self._new_bound() if a_along and out is None else None
        found = halves.product(
            self._halves_of(rows_of_a),
            self._halves_of(rows_of_b),
            a_along=a_along,
            b_along=b_along,
            three=precision == "none",
            bias=bias,
            bound=bound,
            out=out,
        )
        if bound is not None:
            self._remember(found, bounds=(bound,))
        return found

    def _halves_of(self, rows: Tensor) -> Halves:
        found: Halves | None = self._recall(rows, "halves")
        if found is None:
            bounds: Bounds | None = self._recall(rows, "bounds")
            if bounds is None:
                bound = self._new_bound()
                bound = torch.zeros_like(self._zero) if bound is None else bound
                halves.find_bound(rows, bound)
                bounds = (bound,)
                self._remember(rows, bounds=bounds)
            found = self._split(rows, bounds)
            self._remember(rows, halves=found)
        return found

    def _split(self, rows: Tensor, bounds: Bounds, *function: Any) -> Halves:
        one, other = (*bounds, self._zero)[:2]
        return halves.split(rows, one, other, *function)

    def _new_bound(self) -> Tensor | None:
        """Zero at first; None where there are no more of them."""
        if self._used == len(self._room):
            return None
        self._used += 1
        return self._room[self._used - 1 : self._used]

    def _bounds_of(self, x: Any) -> Bounds | None:
        found: Bounds | None = None
        if isinstance(x, Tensor) and self._is_rows(x):
            found = self._recall(_rows_of(x), "bounds")
        return found

    # What is what ---------------------------------------------------------------------------

    def _is_ours(self, x: Tensor) -> bool:
        plain = x.dtype is torch.float32 and x.layout is torch.strided
        return plain and x.device == self._device

    def _is_rows(self, x: Tensor) -> bool:
        """Whether it is one of ours that lies in memory row by row, without gaps; no images."""
        return self._is_ours(x) and x.dim() in (2, 3) and x.shape[-1] > 1 and x.is_contiguous()

    def _is_combination(self, a: Tensor, x: Tensor) -> bool:
        """Whether a [n, count] times x is a sum of a few long rows."""
        if not (self._is_ours(a) and self._is_ours(x)) or a.dim() != 2:
            return False
        size, count = a.shape
        return (
            x.shape == (count,)
            and count <= MOST_ROWS
            and LEAST_COLUMNS <= size <= halves.LARGEST
            and a.stride(0) == 1
            and x.is_contiguous()
        )

    # What is known ----------------------------------------------------------------------------

    def _remember(
        self, rows: Tensor, *, halves: Halves | None = None, bounds: Bounds | None = None
    ) -> None:
        storage = rows.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = _Memory(StorageWeakRef(storage))
            if len(self._memories) > self._most_memories:
                self._let_go()
        stream = torch.cuda.current_stream(self._device)
        if halves is not None:
            memory.halves[_key(rows)] = _Known(halves, stream, stream.record_event())
        if bounds is not None:
            memory.bounds[_key(rows)] = _Known(bounds, stream, stream.record_event())

    def _recall(self, rows: Tensor, what: Literal["halves", "bounds"]) -> Any:
        number = rows.untyped_storage()._cdata
        memory = self._memories.get(number)
        known = None if memory is None else getattr(memory, what).get(_key(rows))
        if known is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream != known.stream:
                stream.wait_event(known.found)
            return known.what
        if self._before is None or number in self._changed:
            return None
        # Of what was found before there is nothing to wait for: it is replayed as a whole.
        earlier = self._before._memories.get(number)
        known = None if earlier is None else getattr(earlier, what).get(_key(rows))
        return None if known is None else known.what

    def _forget(self, changed: Tensor) -> None:
        """What was known of whatever shares its memory."""
        if changed.layout is not torch.strided:
            return
        storage = changed.untyped_storage()
        self._memories.pop(storage._cdata, None)
        if self._before is not None:
            self._changed[storage._cdata] = StorageWeakRef(storage)

    def _let_go(self) -> None:
        """Of what is known of memory that is gone."""
        gone = [number for number, memory in self._memories.items() if memory.storage.expired()]
        for number in gone:
            del self._memories[number]
        self._most_memories = max(FEWEST_MEMORIES, 2 * len(self._memories))


def _rows_of(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _key(rows: Tensor) -> Key:
    return rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0)


def _has_rows(x: Tensor) -> bool:
    """Whether it lies in memory row by row."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, list | tuple) else (given,):
                if isinstance(tensor, Tensor):
                    yield tensor
