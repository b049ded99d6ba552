"""Splits and bounds of matrices, kept by the memory that the matrices are in."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton.launching import launch
from krylov_descent.cuda.triton.split_fp16 import BLOCK, SplitMatrix
from krylov_descent.runtime.private import StorageWeakRef, storage_number

# With more pieces of memory than this in the cache, those that are gone are looked for.
FEWEST_MEMORIES = 32
# Bounds of matrices that one recording has room for.
BOUNDS = 1 << 14

Key = tuple[int, int, int, int]


class Bounds:
    """Room for bounds of matrices, which one kernel sets back at the beginning of a recording.

    Args:
        device: the GPU.

    Attributes:
        one: the bound of values up to one.
    """

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(BOUNDS, dtype=torch.int32, device=device)
        launch(kernels.reset, (BOUNDS // BLOCK, 1), (self._room,), (BLOCK,))
        self.one, self._used = self._room[:1], 1

    def new(self) -> Tensor:
        """A bound that is zero at first; where there is no more room, by a kernel of its own."""
        if self._used == len(self._room):
            return torch.zeros_like(self.one)
        self._used += 1
        return self._room[self._used - 1 : self._used]


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a matrix.

    Attributes:
        stream: on which it was found.
        found: when, on that stream.
        split: of the matrix; None where not known.
        bound: likewise.
    """

    stream: torch.cuda.Stream
    found: torch.cuda.Event
    split: SplitMatrix | None
    bound: Tensor | None


@dataclass(frozen=True, slots=True)
class _Memory:
    """The matrices in a piece of memory, by where they lie.

    While the weak reference is held, no other piece of memory has its number.
    """

    storage: StorageWeakRef
    matrices: dict[Key, _Known] = field(default_factory=dict)


class MatrixCache:
    """What is known of matrices on a GPU, as long as their memory lives and is not written to.

    Args:
        device: the GPU.
        before: the cache of a recording that is always replayed before this one.
    """

    def __init__(self, device: torch.device, before: "MatrixCache | None" = None) -> None:
        self._device, self._before = device, before
        self._memories: dict[int, _Memory] = {}
        self._most_memories = FEWEST_MEMORIES
        self._changed: dict[int, StorageWeakRef] = {}  # since the recording before

    def clear(self) -> None:
        """Forget everything."""
        self._memories.clear()
        self._before = None

    def remember(
        self, rows: Tensor, *, split: SplitMatrix | None = None, bound: Tensor | None = None
    ) -> None:
        """Note the split of a matrix, with its bound, or the bound alone: found on this stream."""
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
        """Of a matrix, ready for this stream; None where it is not known."""
        known = self._recall(rows)
        return None if known is None else known.split

    def bound_of(self, rows: Tensor) -> Tensor | None:
        """Likewise."""
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
        # What the recording before found is there: it is replayed as a whole.
        memory = self._before._memories.get(number)
        return None if memory is None else memory.matrices.get(_key(rows))

    def forget(self, changed: Tensor) -> None:
        """Drop what is known of whatever shares a tensor's memory."""
        if changed.layout is not torch.strided:
            return
        number = storage_number(changed)
        self._memories.pop(number, None)
        if self._before is not None:
            self._changed[number] = StorageWeakRef(changed.untyped_storage())

    def _let_go(self) -> None:
        """Drop what is known of memory that is gone."""
        gone = [number for number, memory in self._memories.items() if memory.storage.expired()]
        for number in gone:
            del self._memories[number]
        self._most_memories = max(FEWEST_MEMORIES, 2 * len(self._memories))


def _key(rows: Tensor) -> Key:
    return rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0)


def memory_of(x: Tensor) -> int | None:
    """The number of its memory."""
    return storage_number(x) if x.layout is torch.strided else None
