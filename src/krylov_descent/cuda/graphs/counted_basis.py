"""A growing basis whose rows are counted on the GPU, so that one recording appends any row."""

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import StoredBasis
from krylov_descent.algorithms.growing_basis import LAST, GrowingBasis
from krylov_descent.runtime.ops import Span, operations


class CountedBasis(GrowingBasis):
    """Rows at a fixed address; see `GrowingBasis`.

    Numbers of all rows are those of as many rows as there are places. Rows that are not made yet
    count as zero.

    Args:
        stored: memory of the rows [slots, n].
    """

    def __init__(self, stored: Tensor) -> None:
        super().__init__(StoredBasis.at(stored))
        slots = len(stored)
        # The first row and the one behind the last: of all rows, of the last ones, of the newest,
        # and of the next one. With no row filled, and how they grow with each row.
        start, growth = [[0, 0], [-LAST, 0], [-1, 0], [0, 1]], [[0, 1], [1, 1], [1, 1], [1, 1]]
        self._start = torch.tensor(start, device=stored.device)
        self._growth = torch.tensor(growth, device=stored.device)
        self._ends = self._start.clone()
        self._all, self._last_rows = Span(self._ends[0], slots), Span(self._ends[1], LAST)
        self._newest, self._next = self._ends[2, :1], self._ends[3, :1]

    def empty_alike(self) -> GrowingBasis:
        return CountedBasis(torch.zeros_like(self.rows.stored))

    def begin(self) -> None:
        self.rows.stored.zero_()  # rows that are not finite would spoil combinations
        self.begin_at(0)

    def begin_at(self, row: int) -> None:
        self._ends.copy_(self._start + row * self._growth)

    def append(self, vector: Tensor, scale: Tensor) -> None:
        operations().write_row(self.rows.stored, self._next, vector, scale)
        self._ends.add_(self._growth)

    def newest(self) -> Tensor:
        return self.rows.stored.index_select(0, self._newest).squeeze(0)

    def waiting(self) -> Tensor:
        return self.rows.stored.index_select(0, self._next).squeeze(0)

    def times(self, vector: Tensor) -> Tensor:
        return operations().project(self.rows.stored, vector, self._all)

    def times_last(self, vector: Tensor) -> Tensor:
        return operations().project(self.rows.stored, vector, self._last_rows)

    def subtracted(self, vector: Tensor, coefficients: Tensor) -> Tensor:
        return operations().subtract(vector, self.rows.stored, coefficients, self._all)

    def subtracted_last(self, vector: Tensor, coefficients: Tensor) -> Tensor:
        return operations().subtract(vector, self.rows.stored, coefficients, self._last_rows)

    def combine_last(self, coefficients: Tensor) -> Tensor:
        return operations().combine(self.rows.stored, coefficients, span=self._last_rows)

    def gram(self) -> Tensor:
        return operations().gram(self.rows.stored, self._all)

    def add_to_last(self, numbers: Tensor, further: Tensor) -> Tensor:
        index, _ = self._last_rows.indices(len(numbers))
        return numbers.index_add(0, index, further)

    def note(self, table: Tensor, numbers: Tensor) -> None:
        table.index_copy_(0, self._newest, numbers.unsqueeze(0))
