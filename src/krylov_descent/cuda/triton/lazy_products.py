"""What is still to be made while operations pass by, and made before anyone looks at it.

A product waits until it is known what is made of it. A function of a narrow product waits, in a
chain, for the next one, and a sum of long vectors for a projection, which has to read it anyway.
Everything that looks at a matrix says so before (`settled`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import chains, vectors
from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.chains import BOUNDED_BY_ONE, NOTHING, Chain, Stage
from krylov_descent.cuda.triton.matrix_cache import Bounds, Knowledge, memory_of
from krylov_descent.cuda.triton.split_fp16 import Function, Halves, Planned, Product
from krylov_descent.cuda.triton.vectors import Sum
from krylov_descent.runtime.private import StorageWeakRef, storage_at, storage_number


@dataclass(slots=True)
class Waiting:
    """A product that is not made yet.

    Attributes:
        storage: its memory.
        product: what it is.
        used: whether something was made of it, so that it may never be asked for.
    """

    storage: StorageWeakRef
    product: Product
    used: bool = False


@dataclass(frozen=True, slots=True)
class _Made:
    """What others may look at while the stream that makes it is not waited for.

    A product that something was made of before it was asked for itself, or the result of a job.

    Attributes:
        storage: its memory.
        stream: on which it was made at last; others have to wait for that.
        done: there, after it.
    """

    storage: StorageWeakRef
    stream: torch.cuda.Stream
    done: torch.cuda.Event


class Pending:
    """Products and functions of products that are to be made, and the halves of what is made.

    Args:
        device: the GPU.
        known: what is known of matrices.
        bounds: room for those of others.
    """

    def __init__(self, device: torch.device, known: Knowledge, bounds: Bounds) -> None:
        self._device, self._known, self._bounds = device, known, bounds
        self._waiting: dict[int, Waiting] = {}
        self._made: dict[int, _Made] = {}
        self._chain = Chain(device)
        self._sum: Sum | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting or self._made or self._chain or self._sum)

    def settle(self, *, used_too: bool = False) -> None:
        """Make the chain, and the products that still wait and are not forgotten; on this stream.

        Args:
            used_too: also products of which something was made.
        """
        self._make_sum()
        self._chain.make(self._known)
        for number, waiting in list(self._waiting.items()):
            if waiting.storage.expired():
                del self._waiting[number]
            elif used_too or not waiting.used:
                self._settle(waiting)

    def settle_readers_of(self, changed: Sequence[Tensor]) -> None:
        """Make all that may have something to read from memory that is to change."""
        self._chain.make(self._known)
        memories = {memory_of(tensor) for tensor in changed}
        if self._sum is not None and memories & _memories_of(self._sum):
            self._make_sum()
        for waiting in list(self._waiting.values()):
            others = (waiting.product.bias, waiting.product.added)
            reads = any(x is not None and memory_of(x) in memories for x in others)
            if reads and not waiting.storage.expired():
                self._settle(waiting)

    def settled(self, x: Tensor) -> None:
        """Make what is to be in this memory, if there is something."""
        number = memory_of(x)
        if number is None:
            return
        if self._sum is not None and number == memory_of(self._sum.x):
            self._make_sum()
        if self._chain.holds(number):
            self._chain.make(self._known)
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            self._wait_for(number)
            return
        product, bound = self._with_halves(waiting.product), self._bounds.new()
        out = _all_of(x, product)
        if product.added is None:
            halves.product(product, bound=bound, out=out)
            self._known.remember(out, bound=bound)
        else:
            self.settled(product.added)
            alone = halves.product(replace(product, added=None))
            torch.add(alone, product.added.detach(), out=out)
        if waiting.used:
            self._note_made(number, waiting.storage)

    def all_settled(self, *args: Any) -> tuple[Any, ...]:
        """The same for each tensor among these, which are given back."""
        for x in args:
            if isinstance(x, Tensor):
                self.settled(x)
        return args

    def note_made(self, x: Tensor) -> None:
        """Let other streams wait for this one, as far as it is now, before they look at x."""
        number = memory_of(x)
        if number is not None:
            self._note_made(number, StorageWeakRef(x.untyped_storage()))

    def _note_made(self, number: int, storage: StorageWeakRef) -> None:
        stream = torch.cuda.current_stream(self._device)
        self._made[number] = _Made(storage, stream, stream.record_event())

    def wait(self, product: Product) -> Tensor:
        """The memory of a product that is made when someone looks at it."""
        m, n, _ = product.sizes
        out = torch.empty(m, n, dtype=torch.float32, device=self._device)
        storage = out.untyped_storage()
        # With those whose memory is gone their halves are let go.
        gone = [k for k, waiting in self._waiting.items() if waiting.storage.expired()]
        for number in gone:
            del self._waiting[number]
        self._waiting[storage_number(out)] = Waiting(StorageWeakRef(storage), product)
        return out

    def wait_with_sum(self, found: Sum) -> None:
        """Let a sum be written when someone looks at it; what it is made of is there."""
        self._make_sum()
        self._sum = found

    def take_sum(self, x: Tensor) -> Sum | None:
        """What waits to be written to all of a vector, for someone who writes it; or None."""
        found = self._sum
        if found is None or (x.data_ptr(), x.shape) != (found.x.data_ptr(), found.x.shape):
            return None
        self._sum = None
        return found

    def waits(self, x: object) -> Waiting | None:
        """What waits to be written to a matrix, all of it."""
        if not isinstance(x, Tensor):
            return None
        number = memory_of(x)
        waiting = None if number is None else self._waiting.get(number)
        if waiting is None or x.shape != waiting.product.sizes[:2] or not x.is_contiguous():
            return None
        return waiting

    def function_of(self, waiting: Waiting, function: Function) -> Tensor | None:
        """A function of a product that waits; None where that must be made first."""
        product, in_one = waiting.product, function.kind in BOUNDED_BY_ONE
        bound = self._bounds.one if in_one else self._bounds.new()
        if bound is None or not (product.added is None if in_one else product.bounded):
            return None
        waiting.used = True
        m, n, _ = product.sizes
        out = torch.empty(m, n, dtype=torch.float32, device=self._device)
        if chains.may_be_stage(product, function):
            self._go_on_with(product, function, out, bound)
            return out
        product = self._with_halves(product)
        found = halves.function_of_product(product, function, out, None if in_one else bound)
        self._known.remember(out, halves=replace(found, bound=bound), bound=bound)
        return out

    def operand(self, rows: Tensor, *, three: bool, narrow: bool) -> Halves | Planned:
        """What a product has of its first matrix, whose rows are given.

        Args:
            rows: of the matrix.
            three: whether both halves are wanted.
            narrow: whether the product may be a stage of a chain, and its rows are along the sum.
        """
        if narrow:
            waiting = self.waits(rows)
            if waiting is not None:
                self._go_on_with_nothing(waiting, rows)
            last = self._chain.ends_with(rows)
            if last is not None:
                return Planned(last.out, last.bound)
        return self.halves_of(rows, three)

    def halves_of(self, rows: Tensor, three: bool) -> Halves:
        """The halves of a matrix; made where they are not known."""
        self.settled(rows)
        found: Halves | None = self._known.recall(rows, "halves")
        if found is None or (three and found.low is None):
            found = halves.split(rows, self.bound_of(rows), three=three)
            self._known.remember(rows, halves=found)
        return found

    def bound_of(self, rows: Tensor) -> Tensor:
        """The bound of a matrix that is made; found where it is not known."""
        bound: Tensor | None = self._known.recall(rows, "bound")
        if bound is None:
            bound = self._bounds.some()
            halves.find_bound(rows, bound)
            self._known.remember(rows, bound=bound)
        return bound

    def _make_sum(self) -> None:
        found, self._sum = self._sum, None
        if found is not None:
            vectors.scale_and_add(found)

    def _settle(self, waiting: Waiting) -> None:
        storage = storage_at(waiting.storage)
        empty = torch.empty(0, dtype=torch.float32, device=self._device)
        self.settled(empty.set_(storage))

    def _wait_for(self, number: int) -> None:
        """Let this stream wait for a product that another one made."""
        made = self._made.get(number)
        if made is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream != made.stream:
                stream.wait_event(made.done)

    def _with_halves(self, product: Product) -> Product:
        """Of a matrix that was in a chain, where this is none of its stages."""
        if isinstance(product.a, Halves):
            return product
        return replace(product, a=self.halves_of(product.a.matrix, product.three))

    def _go_on_with(self, product: Product, function: Function, out: Tensor, bound: Tensor) -> None:
        """Let a function of a narrow product be the next stage, or the first of a new chain."""
        stage = Stage(product, function, out.detach(), bound)
        if not self._chain.takes(stage):
            self._chain.make(self._known)
            stage = replace(stage, product=self._with_halves(product))
        self._chain.append(stage)

    def _go_on_with_nothing(self, waiting: Waiting, x: Tensor) -> None:
        """Let a product that goes into another one as it is be a stage, where that is possible."""
        product = waiting.product
        if waiting.used or not chains.may_be_stage(product, NOTHING):
            return
        bound, number = self._bounds.new(), memory_of(x)
        if bound is not None and number is not None:
            del self._waiting[number]
            self._go_on_with(product, NOTHING, _all_of(x, product), bound)


def _memories_of(found: Sum) -> set[int | None]:
    return {memory_of(x) for x in (found.x, found.scale, found.other)}


def _all_of(x: Tensor, product: Product) -> Tensor:
    """The matrix that a product is to be written to, of whose memory x has a part."""
    m, n, _ = product.sizes
    return x.detach().as_strided((m, n), (n, 1), 0)
