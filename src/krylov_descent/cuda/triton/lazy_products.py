"""Deferred matrix products, computed when first read.

Deferring lets one kernel compute the product and a function of it. Before an operation reads a
tensor, the tensor is materialised. Before it writes to one, the products that read it are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.triton import split_fp16
from krylov_descent.cuda.triton.matrix_cache import Bounds, MatrixCache, memory_of
from krylov_descent.cuda.triton.split_fp16 import BOUNDED_BY_ONE, Function, Product, SplitMatrix
from krylov_descent.runtime.private import StorageWeakRef, storage_at, storage_number


@dataclass(slots=True)
class LazyProduct:
    """A product that is not computed yet.

    Attributes:
        storage: the memory that the result will be written to.
        product: the operands.
        used: whether a function of the product was computed; perhaps nothing else reads it.
    """

    storage: StorageWeakRef
    product: Product
    used: bool = False


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor that other streams have to wait for: a used product or the result of a job.

    Attributes:
        storage: its memory.
        stream: the stream that computes it.
        done: event on this stream behind the computation.
    """

    storage: StorageWeakRef
    stream: torch.cuda.Stream
    done: torch.cuda.Event


class LazyProducts:
    """All lazy products of a recording, and the splits and bounds of materialised matrices.

    Args:
        device: the GPU.
        before: the cache of a recording that is always replayed before this one.

    Attributes:
        device: as given.
        cache: known splits and bounds.
        bounds: allocates bounds.
    """

    def __init__(self, device: torch.device, before: MatrixCache | None = None) -> None:
        self.device, self.cache, self.bounds = device, MatrixCache(device, before), Bounds(device)
        self._lazy: dict[int, LazyProduct] = {}
        self._made: dict[int, _Made] = {}

    def __bool__(self) -> bool:
        return bool(self._lazy or self._made)

    def defer(self, product: Product) -> Tensor:
        """A tensor [M, N] for a product that is computed when the tensor is first read."""
        m, n, _ = product.sizes
        out = torch.empty(m, n, dtype=torch.float32, device=self.device)
        self._drop_expired()
        self._lazy[storage_number(out)] = LazyProduct(
            StorageWeakRef(out.untyped_storage()), product
        )
        return out

    def find(self, x: object) -> LazyProduct | None:
        """The lazy product of which x is the whole result; None otherwise."""
        if not isinstance(x, Tensor):
            return None
        number = memory_of(x)
        found = None if number is None else self._lazy.get(number)
        whole = found is not None and x.shape == found.product.sizes[:2] and x.is_contiguous()
        return found if whole else None

    def function_of(self, lazy: LazyProduct, function: Function) -> Tensor | None:
        """A function of a lazy product [M, N]; None if the product must be materialised first."""
        product, in_one = lazy.product, function.kind in BOUNDED_BY_ONE
        if not (product.added is None if in_one else product.bounded):
            return None
        lazy.used = True
        m, n, _ = product.sizes
        out = torch.empty(m, n, dtype=torch.float32, device=self.device)
        bound = self.bounds.one if in_one else self.bounds.new()
        found = split_fp16.function_of_product(product, function, out, None if in_one else bound)
        self.cache.remember(out, split=replace(found, bound=bound))
        return out

    def materialise(self, *args: Any) -> tuple[Any, ...]:
        """Compute the lazy products in the memory of the tensors among args; returns args."""
        for x in args:
            if isinstance(x, Tensor):
                self._materialise(x)
        return args

    def materialise_readers_of(self, changed: Sequence[Tensor]) -> None:
        """Compute all lazy products that read memory which is about to change."""
        memories = {memory_of(tensor) for tensor in changed}
        for lazy in list(self._lazy.values()):
            others = (lazy.product.bias, lazy.product.added)
            reads = any(x is not None and memory_of(x) in memories for x in others)
            if reads and not lazy.storage.expired():
                self._materialise_all_of(lazy)

    def materialise_all(self, *, used_too: bool = False) -> None:
        """Compute on this stream all lazy products whose memory is still alive.

        Args:
            used_too: include products of which a function was computed.
        """
        self._drop_expired()
        for lazy in list(self._lazy.values()):
            if (used_too or not lazy.used) and not lazy.storage.expired():
                self._materialise_all_of(lazy)

    def note_made(self, x: Tensor) -> None:
        """Make other streams wait for this stream's kernels so far before they read x."""
        number = memory_of(x)
        if number is not None:
            self._note_made(number, StorageWeakRef(x.untyped_storage()))

    def split_of(self, rows: Tensor, *, exact: bool) -> SplitMatrix:
        """The split of a matrix, from the cache or computed."""
        self._materialise(rows)
        found = self.cache.split_of(rows)
        if found is None or (exact and found.low is None):
            found = split_fp16.split(rows, self.bound_of(rows), exact=exact)
            self.cache.remember(rows, split=found)
        return found

    def bound_of(self, rows: Tensor) -> Tensor:
        """The bound of a materialised matrix, from the cache or computed."""
        bound = self.cache.bound_of(rows)
        if bound is None:
            bound = self.bounds.new()
            split_fp16.find_bound(rows, bound)
            self.cache.remember(rows, bound=bound)
        return bound

    def _drop_expired(self) -> None:
        """Drop products whose memory was freed, and with them the splits of their operands."""
        gone = [number for number, lazy in self._lazy.items() if lazy.storage.expired()]
        for number in gone:
            del self._lazy[number]

    def _materialise(self, x: Tensor) -> None:
        number = memory_of(x)
        if number is None:
            return
        lazy = self._lazy.pop(number, None)
        if lazy is None:
            self._wait_for(number)
            return
        product = lazy.product
        m, n, _ = product.sizes
        out = x.detach().as_strided((m, n), (n, 1), 0)  # x may be a part of it
        if product.added is None:
            bound = self.bounds.new()
            split_fp16.product(product, bound=bound, out=out)
            self.cache.remember(out, bound=bound)
        else:
            self._materialise(product.added)
            alone = split_fp16.product(replace(product, added=None))
            torch.add(alone, product.added.detach(), out=out)
        if lazy.used:
            self._note_made(number, lazy.storage)

    def _materialise_all_of(self, lazy: LazyProduct) -> None:
        storage = storage_at(lazy.storage)
        empty = torch.empty(0, dtype=torch.float32, device=self.device)
        self._materialise(empty.set_(storage))

    def _note_made(self, number: int, storage: StorageWeakRef) -> None:
        stream = torch.cuda.current_stream(self.device)
        self._made[number] = _Made(storage, stream, stream.record_event())

    def _wait_for(self, number: int) -> None:
        """Make this stream wait for the tensor if another stream computes it."""
        made = self._made.get(number)
        if made is not None:
            stream = torch.cuda.current_stream(self.device)
            if stream != made.stream:
                stream.wait_event(made.done)
