"""Where the K + m vectors of the basis are kept, when beside the parameters there is no room.

The paper names the memory for K + 1 parameter vectors as the drawback of its method. Three ways
out, which can be combined:

    over ranks     each of R ranks keeps the same slice of every vector: (K + m)·n/R numbers
    in bfloat16    half the memory of float32; products and sums stay in the parameters' dtype
    on the host    in pinned memory, from where blocks are fetched while the last one is in use

`StoredBasis` keeps rows and multiplies with them, block by block; `Alone`, `Replicated` and
`Sharded` say which part of a vector this rank keeps and how inner products over parts become whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from krylov_descent.runtime.pinned_copies import PinnedCopies
from krylov_descent.runtime.precision import forward_precision
from krylov_descent.runtime.ranks import Ranks

# A block that is converted or fetched at a time is a sixteenth of the rows, but no less than is
# worth a copy, and no more numbers than this.
LARGEST_BLOCK, PARTS, NARROWEST = 1 << 24, 16, 4096


@dataclass(frozen=True, slots=True)
class Storage:
    """How rows are kept.

    Attributes:
        dtype: torch.bfloat16, or None for that of the vectors.
        device: the CPU, or None for that of the vectors.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @property
    def is_plain(self) -> bool:
        """Whether rows are kept as vectors are."""
        return self.dtype is None and self.device is None

    @classmethod
    def checked(
        cls, dtype: torch.dtype | None, device: torch.device | str | None, like: Tensor
    ) -> "Storage":
        """What the user asked for; what is no change for vectors like these counts as None."""
        if dtype not in (None, like.dtype, torch.bfloat16):
            raise ValueError(
                f"`basis_dtype` must be torch.bfloat16, or None for that of the parameters "
                f"({like.dtype}), found {dtype}"
            )
        place = None if device is None else _device_of(device)
        if device is not None and (place is None or place.type not in ("cpu", like.device.type)):
            raise ValueError(
                f"`basis_device` must be 'cpu', or None for that of the parameters "
                f"({like.device}), found {device!r}"
            )
        moved = place is not None and place.type != like.device.type
        return cls(dtype if dtype != like.dtype else None, place if moved else None)


def _device_of(name: torch.device | str) -> torch.device | None:
    """None where torch has no such device."""
    try:
        return torch.device(name)
    except RuntimeError:
        return None


class Placement(Protocol):
    """Which part of a vector [n] this rank keeps, and how parts become whole."""

    size: int  # of the part

    def own(self, vector: Tensor) -> Tensor:
        """The part of a vector [n] that is the same on all ranks; no copy."""

    def whole(self, part: Tensor) -> Tensor:
        """The vector [n] of which every rank has its part."""

    def total(self, vector: Tensor) -> Tensor:
        """The part of the sum over ranks of vectors [n]; may overwrite the vector."""

    def dots(self, numbers: Tensor) -> Tensor:
        """Inner products over parts as those over whole vectors."""

    def settled(self, numbers: Tensor) -> Tensor:
        """Numbers out of `dots` with every bit the same on all ranks."""

    def to_project(self, vector: Tensor) -> Tensor:
        """What to multiply the basis with; may overwrite the vector.

        Over ranks the products add up to those with the sum over ranks of vectors [n].
        """


class Alone:
    """One process keeps whole vectors.

    Args:
        size: n.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def own(self, vector: Tensor) -> Tensor:
        """The vector."""
        return vector

    def whole(self, part: Tensor) -> Tensor:
        """The vector."""
        return part

    def total(self, vector: Tensor) -> Tensor:
        """The vector."""
        return vector

    def dots(self, numbers: Tensor) -> Tensor:
        """As they are."""
        return numbers

    def settled(self, numbers: Tensor) -> Tensor:
        """As they are."""
        return numbers

    def to_project(self, vector: Tensor) -> Tensor:
        """The vector: each process projects its own."""
        return vector


class Replicated(Alone):
    """Every rank keeps whole vectors.

    Args:
        ranks: that hold the same vectors.
        size: n.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        super().__init__(size)
        self._ranks = ranks

    def total(self, vector: Tensor) -> Tensor:
        """One all-reduce of n numbers."""
        return self._ranks.sum_vector(vector)

    def settled(self, numbers: Tensor) -> Tensor:
        """Rank 0's."""
        return self._ranks.agreed(numbers)


class Sharded:
    """Every rank keeps the same slice of each vector.

    Args:
        ranks: R of them.
        size: n.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self._total = ranks, size
        self.part = ranks.slice_of(size)
        self.size = self.part.stop - self.part.start

    def own(self, vector: Tensor) -> Tensor:
        """The slice."""
        return vector[self.part]

    def whole(self, part: Tensor) -> Tensor:
        """One all-gather of n numbers."""
        return self._ranks.gather_slices(part, self._total)

    def total(self, vector: Tensor) -> Tensor:
        """One reduce-scatter of n numbers."""
        return self._ranks.sum_to_slices(vector)

    def dots(self, numbers: Tensor) -> Tensor:
        """Summed over ranks."""
        return self._ranks.sum_vector(numbers)

    def settled(self, numbers: Tensor) -> Tensor:
        """As they are: a sum over ranks has the same bits on all."""
        return numbers

    def to_project(self, vector: Tensor) -> Tensor:
        """The slice of the sum: each rank projects its slice. One reduce-scatter of n numbers."""
        return self.total(vector)


class StoredBasis:
    """Rows [slots, m], kept as a storage says and multiplied with in another dtype and place.

    Args:
        slots: how many rows there may be.
        size: m, of each of them.
        like: a vector of the dtype and device that products are made in.
        storage: how rows are kept.

    Attributes:
        stored: the rows as they are kept.
        count: how many rows there are.
        plain: whether they are kept as vectors are.
        dtype: of the vectors that it takes and gives.
        device: of them.

    Memory: slots · m numbers as stored, and where they are stored otherwise than `like`, up to
    three blocks of a sixteenth of them, of 2²⁴ numbers at most.
    """

    def __init__(self, slots: int, size: int, like: Tensor, storage: Storage) -> None:
        self.dtype, self.device = like.dtype, like.device
        device = storage.device or like.device
        pinned = like.is_cuda and device.type == "cpu"
        self.stored = torch.zeros(
            slots,
            size,
            dtype=storage.dtype or like.dtype,
            device=device,
            pin_memory=pinned,
        )
        self.plain = self.stored.dtype == like.dtype and self.stored.device == like.device
        self._copies = PinnedCopies(like.device) if pinned else None
        self.count = slots

    @classmethod
    def at(cls, room: Tensor) -> "StoredBasis":
        """Rows that are kept plainly in a tensor [slots, m]; what it holds is there until `put`."""
        basis = cls(0, room.shape[1], room, Storage())
        basis.stored, basis.count = room, len(room)
        return basis

    @property
    def rounded(self) -> bool:
        """Whether rows are kept less exactly than vectors come."""
        return self.stored.dtype != self.dtype

    @property
    def epsilon(self) -> float:
        """Machine epsilon of a stored number."""
        return torch.finfo(self.stored.dtype).eps

    def put(self, k: int, vector: Tensor, scale: Tensor | None = None) -> None:
        """Keep a vector [m] as row k; or a multiple of it."""
        if self.plain and scale is not None:
            torch.mul(vector, scale, out=self.stored[k])
            return
        if scale is not None:
            vector = vector * scale
        if self._copies is None:
            self.stored[k].copy_(vector)
        else:
            self._copies.send(vector, self.stored[k])

    def get(self, k: int) -> Tensor:
        """Row k as a vector [m] to read."""
        if self._copies is None:
            return self.stored[k].to(self.device, self.dtype)
        return self._use(self._fetch(slice(k, k + 1), slice(None)))[0]

    def move(self, source: int, target: int) -> None:
        """Copy a row to another place."""
        if self._copies is not None:
            self._copies.wait()
        self.stored[target].copy_(self.stored[source])

    def cut(self, rows: int) -> None:
        """Only the first rows count from now on."""
        self.count = rows

    def times(self, rows: slice, vector: Tensor) -> Tensor:
        """The inner products of some rows with a vector [m]."""
        if self.plain:
            return self.stored[rows] @ vector
        total = vector.new_zeros(rows.stop - rows.start)
        for columns, block in self._blocks(rows):
            total += block @ vector[columns]
        return total

    def combine(self, rows: slice, coefficients: Tensor) -> Tensor:
        """Σ c_k row k over some rows as a new vector [m]."""
        if self.plain:
            return self.stored[rows].t() @ coefficients
        result = coefficients.new_empty(self.stored.shape[1])
        for columns, block in self._blocks(rows):
            result[columns] = block.t() @ coefficients
        return result

    def subtracted(self, vector: Tensor, rows: slice, coefficients: Tensor) -> Tensor:
        """The vector [m] less what `combine` gives; overwrites it."""
        if self.plain:
            return vector.addmv_(self.stored[rows].t(), coefficients, alpha=-1)
        return vector.sub_(self.combine(rows, coefficients))

    def gram(self) -> Tensor:
        """The inner products of all rows with one another [count, count]; the upper may be zero.

        One reading of the rows, in the precision of forward passes. On a CPU, where a product of
        matrices would hold a copy of them, one row after another.
        """
        rows = slice(0, self.count)
        if self.plain and self.stored.is_cuda:
            with forward_precision():
                return self.stored[rows] @ self.stored[rows].t()
        found = torch.zeros(self.count, self.count, dtype=self.dtype, device=self.device)
        if self.plain:
            for k in range(self.count):
                found[k, : k + 1] = self.stored[: k + 1] @ self.stored[k]
            return found
        with forward_precision():
            for _, block in self._blocks(rows):
                found.addmm_(block, block.t())
        return found

    def _blocks(self, rows: slice) -> Iterator[tuple[slice, Tensor]]:
        """Columns of some rows where and as they are multiplied with.

        From the host the next block is on its way while the last one is in use.
        """
        size, count = self.stored.shape[1], rows.stop - rows.start
        width = min(LARGEST_BLOCK // max(1, count), max(NARROWEST, size // PARTS))
        spans = [slice(start, min(start + width, size)) for start in range(0, size, width)]
        coming = self._fetch(rows, spans[0]) if spans else None
        for index, columns in enumerate(spans):
            assert coming is not None
            block = self._use(coming)
            coming = self._fetch(rows, spans[index + 1]) if index + 1 < len(spans) else None
            yield columns, block

    def _fetch(self, rows: slice, columns: slice) -> Tensor:
        block = self.stored[rows, columns]
        return block if self._copies is None else self._copies.fetch(block)

    def _use(self, fetched: Tensor) -> Tensor:
        """What was fetched, in the dtype that products are made in."""
        if self._copies is not None:
            fetched = self._copies.arrived(fetched)
        return fetched.to(self.dtype)
