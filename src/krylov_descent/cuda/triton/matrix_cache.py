"""Cache of the splits and bounds of matrices, by the storage of the matrix."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton.launching import launch
from krylov_descent.cuda.triton.split_fp16 import BLOCK, SplitMatrix
from krylov_descent.runtime.private import StorageWeakRef, storage_number

# With more storages than this in the cache, freed ones are searched for.
FEWEST_MEMORIES = 32
# Bounds that are allocated at once for a recording.
BOUNDS = 1 << 14

Key = tuple[int, int, int, int]


class Bounds:
    """Allocator of bounds, all of which one kernel resets at the beginning of a recording.

    Args:
        device: the GPU.

    Attributes:
        one: the bound of values between -1 and 1.
    """

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(BOUNDS, dtype=torch.int32, device=device)
        launch(kernels.reset, (BOUNDS // BLOCK, 1), (self._room,), (BLOCK,))
        self.one, self._used = self._room[:1], 1

    def new(self) -> Tensor:
        """A new bound of zero; when the allocation is used up, by a separate kernel."""
        if self._used == len(self._room):
            return torch.zeros_like(self.one)
        self._used += 1
        return self._room[self._used - 1 : self._used]


@dataclass(frozen=True, slots=True)
class _Known:
    """The cached split and bound of a matrix.

    Attributes:
        stream: the stream that computes them.
        found: event on this stream behind the computation.
        split: split of the matrix; None if not known.
        bound: bound of the matrix; None if not known.
    """

    stream: torch.cuda.Stream
    found: torch.cuda.Event
    split: SplitMatrix | None
    bound: Tensor | None


@dataclass(frozen=True, slots=True)
class _Memory:
    """The matrices in a storage, by address, shape and stride.

    While the weak reference is held, no other storage gets the same number.
    """

    storage: StorageWeakRef
    matrices: dict[Key, _Known] = field(default_factory=dict)


class MatrixCache:
    """Splits and bounds of matrices on a GPU, valid until the matrix is freed or written to.

    Args:
        device: the GPU.
        before: the cache of a recording that is always replayed before this one.
    """

    def __init__(self, device: torch.device, before: "MatrixCache | None" = None) -> None:
        self._device, self._before = device, before
        self._memories: dict[int, _Memory] = {}
        self._most_memories = FEWEST_MEMORIES
        self._changed: dict[int, StorageWeakRef] = {}  # written to since `before`

    def clear(self) -> None:
        """Forget everything."""
        self._memories.clear()
        self._before = None

    def remember(
        self, rows: Tensor, *, split: SplitMatrix | None = None, bound: Tensor | None = None
    ) -> None:
        """Cache a split with its bound, or a bound alone, computed on the current stream."""
        number = storage_number(rows)
        memory = self._memories.get(number)
        if memory is None:
            memory = self._memories[number] = _Memory(StorageWeakRef(rows.untyped_storage()))
            if len(self._memories) > self._most_memories:
                self._let_go()
        stream = torch.cuda.current_stream(self._device)
        bound = bound if split is None else split.bound
        memory.matrices[_key(rows)] = _Known(stream, stream.record_event(), split, bound)

    def split_of(self, rows: Tensor) -> SplitMatrix | None:
        """The split of a matrix, which this stream waits for; None if not known."""
        known = self._recall(rows)
        return None if known is None else known.split

    def bound_of(self, rows: Tensor) -> Tensor | None:
        """The bound of a matrix, which this stream waits for; None if not known."""
        known = self._recall(rows)
        return None if known is None else known.bound

    def _recall(self, rows: Tensor) -> _Known | None:
        number = storage_number(rows)
        memory = self._memories.get(number)
        known = None if memory is None else memory.matrices.get(_key(rows))
        if known is not None:
            stream = torch.cuda.current_stream(self._device)
            if stream != known.stream:
                stream.wait_event(known.found)
            return known
        if self._before is None or number in self._changed:
            return None
        # No need to wait: the whole earlier recording is replayed before this one.
        memory = self._before._memories.get(number)
        return None if memory is None else memory.matrices.get(_key(rows))

    def forget(self, changed: Tensor) -> None:
        """Drop the entries of all matrices that share a tensor's storage."""
        if changed.layout is not torch.strided:
            return
        number = storage_number(changed)
        self._memories.pop(number, None)
        if self._before is not None:
            self._changed[number] = StorageWeakRef(changed.untyped_storage())

    def _let_go(self) -> None:
        """Drop the entries of freed storages."""
        gone = [number for number, memory in self._memories.items() if memory.storage.expired()]
        for number in gone:
            del self._memories[number]
        self._most_memories = max(FEWEST_MEMORIES, 2 * len(self._memories))


def _key(rows: Tensor) -> Key:
    return rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0)


def memory_of(x: Tensor) -> int | None:
    """The number of a tensor's storage; None if the tensor is not strided."""
    return storage_number(x) if x.layout is torch.strided else None
