"""What is known of matrices while operations pass by: their halves and bounds."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from krylov_descent.cuda.triton import kernels
from krylov_descent.cuda.triton.launching import launch
from krylov_descent.cuda.triton.split_fp16 import BLOCK, Halves
from krylov_descent.runtime.private import StorageWeakRef, storage_number

# Of so many pieces of memory something is known before those that are gone are looked for.
FEWEST_MEMORIES = 32

# So many bounds of matrices in one recording have room.
BOUNDS = 1 << 14

Key = tuple[int, int, int, int]


class Bounds:
    """Room for bounds of matrices, int32 each.

    All at once: a recording sets them back with one kernel before everything else.

    Args:
        device: the GPU.

    Attributes:
        one: a bound [1] of what has values up to one.
    """

    def __init__(self, device: torch.device) -> None:
        self._room = torch.empty(BOUNDS, dtype=torch.int32, device=device)
        launch(kernels.reset, (BOUNDS // BLOCK, 1), (self._room,), (BLOCK,))
        self.one, self._used = self._room[:1], 1

    def new(self) -> Tensor | None:
        """One [1] that is zero at first; None where there are no more of them."""
        if self._used == len(self._room):
            return None
        self._used += 1
        return self._room[self._used - 1 : self._used]

    def some(self) -> Tensor:
        """One that is zero at first, wherever."""
        found = self.new()
        return torch.zeros_like(self.one) if found is None else found


@dataclass(frozen=True, slots=True)
class _Known:
    """Something that is known of a matrix.

    Attributes:
        what: its halves, or its bound.
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
        bound: likewise.
    """

    storage: StorageWeakRef
    halves: dict[Key, _Known] = field(default_factory=dict)
    bound: dict[Key, _Known] = field(default_factory=dict)


class Knowledge:
    """What is known of matrices on a GPU, by the memory that they are in.

    Args:
        device: the GPU.
        before: what was known of another recording, which is always replayed before this.
    """

    def __init__(self, device: torch.device, before: "Knowledge | None") -> None:
        self._device, self._before = device, before
        self._memories: dict[int, _Memory] = {}
        self._most_memories = FEWEST_MEMORIES
        self._changed: dict[int, StorageWeakRef] = {}  # since what was recorded before

    def clear(self) -> None:
        """Forget everything."""
        self._memories.clear()
        self._before = None

    def remember(
        self, rows: Tensor, *, halves: Halves | None = None, bound: Tensor | None = None
    ) -> None:
        """Note what is known of a matrix from now on."""
        storage = rows.untyped_storage()
        memory = self._memories.get(storage_number(rows))
        if memory is None:
            memory = self._memories[storage_number(rows)] = _Memory(StorageWeakRef(storage))
            if len(self._memories) > self._most_memories:
                self._let_go()
        stream = torch.cuda.current_stream(self._device)
        if halves is not None:
            memory.halves[_key(rows)] = _Known(halves, stream, stream.record_event())
        if bound is not None:
            memory.bound[_key(rows)] = _Known(bound, stream, stream.record_event())

    def recall(self, rows: Tensor, what: Literal["halves", "bound"]) -> Any:
        """What is known of a matrix, ready for this stream; or None."""
        number = storage_number(rows)
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

    def forget(self, changed: Tensor) -> None:
        """What was known of whatever shares its memory."""
        if changed.layout is not torch.strided:
            return
        storage = changed.untyped_storage()
        self._memories.pop(storage_number(changed), None)
        if self._before is not None:
            self._changed[storage_number(changed)] = StorageWeakRef(storage)

    def _let_go(self) -> None:
        """Of what is known of memory that is gone."""
        gone = [number for number, memory in self._memories.items() if memory.storage.expired()]
        for number in gone:
            del self._memories[number]
        self._most_memories = max(FEWEST_MEMORIES, 2 * len(self._memories))


def _key(rows: Tensor) -> Key:
    return rows.data_ptr(), rows.shape[0], rows.shape[1], rows.stride(0)


def memory_of(x: Tensor) -> int | None:
    """The number of its memory."""
    return storage_number(x) if x.layout is torch.strided else None
