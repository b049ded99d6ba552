"""The symmetric positive definite matrix D in which the basis vectors are orthonormal."""

from typing import Protocol, runtime_checkable

from torch import Tensor


class Metric(Protocol):
    """A symmetric positive definite matrix D."""

    def solve(self, vector: Tensor) -> Tensor:
        """D⁻¹ vector as a new vector [n]."""

    def multiply(self, vector: Tensor) -> Tensor:
        """D vector as a new vector [n], the inverse of `solve` to rounding."""


@runtime_checkable
class Entrywise(Metric, Protocol):
    """A diagonal D. It acts on each entry separately, and so on any part of a vector."""

    def part(self, part: slice) -> "Entrywise":
        """D for this part of a vector."""


class Diagonal:
    """D, stored as its diagonal [n]."""

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal = diagonal

    def solve(self, vector: Tensor) -> Tensor:
        """The vector divided by D, entry by entry."""
        return vector / self.diagonal

    def multiply(self, vector: Tensor) -> Tensor:
        """The vector times D, entry by entry."""
        return vector * self.diagonal

    def part(self, part: slice) -> Entrywise:
        """D for this part of a vector."""
        return Diagonal(self.diagonal[part])
