"""A stored basis in the making: rows are appended one after another, and used at once."""

from torch import Tensor

from krylov_descent.algorithms.basis_storage import Storage, StoredBasis

# Lanczos: a new vector has most in common with so many rows before it.
LAST = 2


class GrowingBasis:
    """The first rows of a stored basis. An engine may count the rows on its device instead.

    Args:
        rows: the stored basis, with as many rows as there will be.
    """

    def __init__(self, rows: StoredBasis) -> None:
        self.rows, self._filled = rows, 0

    def empty_alike(self) -> "GrowingBasis":
        """Another basis of the same shape, of zeros."""
        slots, size = self.rows.stored.shape
        return GrowingBasis(StoredBasis(slots, size, self.rows.stored, Storage()))

    def begin(self) -> None:
        """Forget all rows."""
        self.begin_at(0)

    def begin_at(self, row: int) -> None:
        """Append from this row on; the rows before it are used."""
        self._filled = row

    def append(self, vector: Tensor, scale: Tensor) -> None:
        """Store a vector [n] times a scale as the next row."""
        self.rows.put(self._filled, vector, scale)
        self._filled += 1

    def newest(self) -> Tensor:
        """The last row as a vector [n], to be read only."""
        return self.rows.get(self._filled - 1)

    def waiting(self) -> Tensor:
        """A copy [n] of what is stored in the next row."""
        return self.rows.get(self._filled).clone()

    def times(self, vector: Tensor) -> Tensor:
        """The inner products of all k rows with a vector [n]."""
        return self.rows.times(slice(0, self._filled), vector)

    def times_last(self, vector: Tensor) -> Tensor:
        """The inner products of the last rows with a vector [n]."""
        return self.rows.times(self._last, vector)

    def subtracted(self, vector: Tensor, coefficients: Tensor) -> Tensor:
        """The vector [n] minus Σ c_k row k over all rows; overwrites the vector."""
        return self.rows.subtracted(vector, slice(0, self._filled), coefficients)

    def subtracted_last(self, vector: Tensor, coefficients: Tensor) -> Tensor:
        """The vector [n] minus Σ c_k row k over the last rows; overwrites the vector."""
        return self.rows.subtracted(vector, self._last, coefficients)

    def combine_last(self, coefficients: Tensor) -> Tensor:
        """Σ c_k row k over the last rows, as a new vector [n]."""
        return self.rows.combine(self._last, coefficients)

    def gram(self) -> Tensor:
        """The inner products between all places for rows, those without a row as zero."""
        return self.rows.gram()

    def add_to_last(self, numbers: Tensor, further: Tensor) -> Tensor:
        """Numbers of all rows, with further numbers of the last rows added; a new tensor."""
        found = numbers.clone()
        found[self._last] += further
        return found

    def note(self, table: Tensor, numbers: Tensor) -> None:
        """Write the first numbers of the table's row for the newest row.

        Args:
            table: [rows, columns].
            numbers: [≤ columns].
        """
        table[self._filled - 1, : len(numbers)] = numbers

    @property
    def _last(self) -> slice:
        return slice(max(0, self._filled - LAST), self._filled)
