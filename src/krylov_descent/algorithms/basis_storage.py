"""Storage of the K + m basis vectors if memory beside the parameters is short.

The paper names the memory for K + 1 parameter vectors as the drawback of its method. There are
three remedies, which can be combined:

    over ranks     each of R ranks stores a slice of every vector: (K + m)·n/R numbers
    in bfloat16    half the memory of float32; products and sums stay in the parameters' dtype
    on the host    in pinned memory; the next block is fetched while the last one is in use

`StoredBasis` stores rows and multiplies with them, block by block. `Alone`, `Replicated` and
`Sharded` say which part of a vector this rank stores, and how inner products over parts are summed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from krylov_descent.runtime.ops import operations
from krylov_descent.runtime.pinned_copies import PinnedCopies
from krylov_descent.runtime.precision import forward_precision
from krylov_descent.runtime.ranks import Ranks

# Rows are converted or fetched in blocks of a sixteenth of the columns. A block has at least
# NARROWEST columns, so that it is worth a copy, and at most LARGEST_BLOCK numbers.
LARGEST_BLOCK, PARTS, NARROWEST = 1 << 24, 16, 4096


@dataclass(frozen=True, slots=True)
class Storage:
    """The dtype and device of stored rows.

    Attributes:
        dtype: torch.bfloat16, or None for the dtype of the vectors.
        device: the CPU, or None for the device of the vectors.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None

    @property
    def is_plain(self) -> bool:
        """Whether rows have the dtype and device of the vectors."""
        return self.dtype is None and self.device is None

    @classmethod
    def checked(
        cls, dtype: torch.dtype | None, device: torch.device | str | None, like: Tensor
    ) -> "Storage":
        """The storage that the user asked for; a dtype or device that `like` has becomes None.

        Raises:
            ValueError: the dtype or device is not supported.
        """
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
    """The device of this name; None if torch has no such device."""
    try:
        return torch.device(name)
    except RuntimeError:
        return None


class Placement(Protocol):
    """Which part of a vector [n] this rank stores, and how parts become whole vectors."""

    size: int  # the length of the part

    def own(self, vector: Tensor) -> Tensor:
        """This rank's part of a vector [n] that is the same on all ranks; a view."""

    def whole(self, part: Tensor) -> Tensor:
        """The vector [n] of which every rank has its part."""

    def total(self, vector: Tensor) -> Tensor:
        """This rank's part of the sum over ranks of vectors [n]; may overwrite the vector."""

    def dots(self, numbers: Tensor) -> Tensor:
        """Inner products over whole vectors, from this rank's inner products over parts."""

    def settled(self, numbers: Tensor) -> Tensor:
        """Results of `dots`, made equal on all ranks to the last bit."""

    def to_project(self, vector: Tensor) -> Tensor:
        """The vector to multiply this rank's rows with; may overwrite the argument.

        Summed over ranks, these products are the products of V with the sum over ranks of vectors
        [n].
        """


class Alone:
    """One process, which stores whole vectors.

    Args:
        size: n.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def own(self, vector: Tensor) -> Tensor:
        """The vector itself."""
        return vector

    def whole(self, part: Tensor) -> Tensor:
        """The vector itself."""
        return part

    def total(self, vector: Tensor) -> Tensor:
        """The vector itself."""
        return vector

    def dots(self, numbers: Tensor) -> Tensor:
        """The numbers, unchanged."""
        return numbers

    def settled(self, numbers: Tensor) -> Tensor:
        """The numbers, unchanged."""
        return numbers

    def to_project(self, vector: Tensor) -> Tensor:
        """The vector itself: each process projects its own vector."""
        return vector


class Replicated(Alone):
    """Every rank stores whole vectors.

    Args:
        ranks: the ranks, which store the same vectors.
        size: n.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        super().__init__(size)
        self._ranks = ranks

    def total(self, vector: Tensor) -> Tensor:
        """One all-reduce of n numbers."""
        return self._ranks.sum_vector(vector)

    def settled(self, numbers: Tensor) -> Tensor:
        """The numbers of rank 0."""
        return self._ranks.agreed(numbers)


class Sharded:
    """Every rank stores its own slice of each vector.

    Args:
        ranks: the R ranks.
        size: n.
    """

    def __init__(self, ranks: Ranks, size: int) -> None:
        self._ranks, self._total = ranks, size
        self.part = ranks.slice_of(size)
        self.size = self.part.stop - self.part.start

    def own(self, vector: Tensor) -> Tensor:
        """This rank's slice of the vector."""
        return vector[self.part]

    def whole(self, part: Tensor) -> Tensor:
        """One all-gather of n numbers."""
        return self._ranks.gather_slices(part, self._total)

    def total(self, vector: Tensor) -> Tensor:
        """One reduce-scatter of n numbers."""
        return self._ranks.sum_to_slices(vector)

    def dots(self, numbers: Tensor) -> Tensor:
        """The numbers, summed over ranks."""
        return self._ranks.sum_vector(numbers)

    def settled(self, numbers: Tensor) -> Tensor:
        """The numbers, unchanged: a sum over ranks has the same bits on all ranks."""
        return numbers

    def to_project(self, vector: Tensor) -> Tensor:
        """This rank's slice of the sum over ranks. One reduce-scatter of n numbers."""
        return self.total(vector)


class StoredBasis:
    """Rows [slots, m], stored in one dtype and place, and multiplied in another.

    Args:
        slots: the most rows.
        size: m, the length of a row.
        like: a vector of the dtype and device in which products are computed.
        storage: the dtype and device of stored rows.

    Attributes:
        stored: the rows as they are stored.
        count: how many rows there are.
        plain: whether rows are stored in the dtype and on the device of `like`.
        dtype: the dtype of arguments and results.
        device: the device of arguments and results.

    Memory: slots · m numbers as stored. If rows are not plain, there are up to three blocks in
    addition, each a sixteenth of the rows and at most 2²⁴ numbers.
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
        """A plain basis in an existing tensor [slots, m], whose content stays until `put`."""
        basis = cls(0, room.shape[1], room, Storage())
        basis.stored, basis.count = room, len(room)
        return basis

    @property
    def rounded(self) -> bool:
        """Whether rows are stored in another dtype than the vectors, and so rounded."""
        return self.stored.dtype != self.dtype

    @property
    def epsilon(self) -> float:
        """Machine epsilon of a stored number."""
        return torch.finfo(self.stored.dtype).eps

    def put(self, k: int, vector: Tensor, scale: Tensor | None = None) -> None:
        """Store a vector [m] as row k, times a scale if there is one."""
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
        """Row k as a vector [m], to be read only."""
        if self._copies is None:
            return self.stored[k].to(self.device, self.dtype)
        return self._use(self._fetch(slice(k, k + 1), slice(None)))[0]

    def move(self, source: int, target: int) -> None:
        """Copy one row over another."""
        if self._copies is not None:
            self._copies.wait()
        self.stored[target].copy_(self.stored[source])

    def cut(self, rows: int) -> None:
        """Drop all but the first rows."""
        self.count = rows

    def times(self, rows: slice, vector: Tensor) -> Tensor:
        """The inner products of some rows with a vector [m]."""
        if self.plain:
            return operations().project(self.stored[rows], vector)
        total = vector.new_zeros(rows.stop - rows.start)
        for columns, block in self._blocks(rows):
            total += block @ vector[columns]
        return total

    def combine(self, rows: slice, coefficients: Tensor) -> Tensor:
        """Σ c_k row k over some rows, as a new vector [m]."""
        if self.plain:
            return operations().combine(self.stored[rows], coefficients)
        result = coefficients.new_empty(self.stored.shape[1])
        for columns, block in self._blocks(rows):
            result[columns] = block.t() @ coefficients
        return result

    def subtracted(self, vector: Tensor, rows: slice, coefficients: Tensor) -> Tensor:
        """The vector [m] minus `combine(rows, coefficients)`; overwrites the vector."""
        if self.plain:
            return operations().subtract(vector, self.stored[rows], coefficients)
        return vector.sub_(self.combine(rows, coefficients))

    def gram(self) -> Tensor:
        """The inner products of all rows [count, count]; the upper triangle may be zero.

        Reads the rows once, in the precision of forward passes. On a CPU a matrix product would
        copy plain rows, so they are multiplied one after another.
        """
        rows = slice(0, self.count)
        if self.plain and self.stored.is_cuda:
            return operations().gram(self.stored[rows])
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
        """Blocks of columns of some rows, in the dtype and on the device of products.

        If rows are on the host, the next block is fetched while the last one is in use.
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
        """A fetched block, in the dtype of products."""
        if self._copies is not None:
            fetched = self._copies.arrived(fetched)
        return fetched.to(self.dtype)
