"""What is still to be made while operations pass by, and made before anyone looks at it.

A product waits until it is known what is made of it.
Everything that looks at a matrix says so before (`settled`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.matrix_cache import Bounds, Knowledge, memory_of
from krylov_descent.cuda.triton.split_fp16 import BOUNDED_BY_ONE, Function, Halves, Product
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
    """Products that are to be made, and the halves of what is made.

    Args:
        device: the GPU.
        known: what is known of matrices.
        bounds: room for those of others.
    """

    def __init__(self, device: torch.device, known: Knowledge, bounds: Bounds) -> None:
        self._device, self._known, self._bounds = device, known, bounds
        self._waiting: dict[int, Waiting] = {}
        self._made: dict[int, _Made] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting or self._made)

    def settle(self, *, used_too: bool = False) -> None:
        """Make the products that still wait and are not forgotten; on this stream.

        Args:
            used_too: also products of which something was made.
        """
        for number, waiting in list(self._waiting.items()):
            if waiting.storage.expired():
                del self._waiting[number]
            elif used_too or not waiting.used:
                self._settle(waiting)

    def settle_readers_of(self, changed: Sequence[Tensor]) -> None:
        """Make all that may have something to read from memory that is to change."""
        memories = {memory_of(tensor) for tensor in changed}
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
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            self._wait_for(number)
            return
        product, bound = waiting.product, self._bounds.new()
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
        found = halves.function_of_product(product, function, out, None if in_one else bound)
        self._known.remember(out, halves=replace(found, bound=bound), bound=bound)
        return out

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


def _all_of(x: Tensor, product: Product) -> Tensor:
    """The matrix that a product is to be written to, of whose memory x has a part."""
    m, n, _ = product.sizes
    return x.detach().as_strided((m, n), (n, 1), 0)
