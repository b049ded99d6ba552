"""Memory for the rows of a basis, at the same address in every step, because recordings read it."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from krylov_descent.runtime.ops import Span

# The memory is used while it has at most so many times the places that are wanted.
MOST_PLACES = 4


@dataclass(frozen=True, slots=True)
class BasisRoom:
    """Places for rows, the first of which are filled.

    Attributes:
        slots: the places [places, n].
        filled: the rows of the current step.
    """

    slots: Tensor
    filled: Span

    @classmethod
    def empty(cls, places: int, like: Tensor) -> Self:
        """Places for vectors like a given one [n], with no row filled."""
        ends = torch.zeros(2, dtype=torch.int64, device=like.device)
        return cls(like.new_zeros(places, len(like)), Span(ends, places))

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """What recordings read."""
        return self.slots, self.filled.ends

    def suits(self, rows: int, places: int, like: Tensor) -> bool:
        """Whether so many rows like a given vector fit in, without wasting much memory.

        Args:
            rows: to be filled.
            places: as many as a new room would have.
            like: the vector [n].
        """
        slots = self.slots
        alike = (slots.shape[1], slots.dtype, slots.device) == (len(like), like.dtype, like.device)
        return alike and rows <= len(slots) <= MOST_PLACES * places

    def fill(self, rows: int) -> None:
        """Count so many rows as filled."""
        self.filled.ends[1].fill_(rows)
