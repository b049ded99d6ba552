"""D, with which the Krylov space is made (paper, Section 4) and its vectors are measured.

A preconditioner is made up-to-date once per step, in the walk over set A that finds the
gradient, and then divides and multiplies vectors. KSD needs D only up to a constant factor; with a
largest entry of about 1, numbers stay within the range of half precision.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from krylov_descent.algorithms.metric import Diagonal, Entrywise, Metric
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.parameters import FlatParameters


@runtime_checkable
class Preconditioner(Metric, Protocol):
    """What KSD asks of a preconditioner; any object with these three methods will do.

    Of an object of the user's the attributes are noted before each step, and tensors in them
    copied: they are put back if the step fails. In a step the objective may be multiplied by a
    power of two, `objective.scale`.
    """

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """Walk over A once, make D, and return value and gradient found on the way.

        `objective.value_and_gradient(data)` returns what is wanted. The data may be a stream
        that can be walked over only once.
        """


@runtime_checkable
class EntrywisePreconditioner(Preconditioner, Entrywise, Protocol):
    """A preconditioner that acts on each entry by itself."""


@runtime_checkable
class InPlace(Preconditioner, Protocol):
    """One whose tensors stay where they are, and that reads no number of them on the host."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """What `solve` and `multiply` read: the same at every step, updated in place."""


@runtime_checkable
class EntrywiseInPlace(InPlace, Entrywise, Protocol):
    """One that also acts on each entry by itself."""


@runtime_checkable
class FromCurvatureSet(Preconditioner, Protocol):
    """One that is completed with the samples of B, which are drawn on the walk over A."""

    def learn(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """Make D, given this rank's samples of B on the device of the parameters."""


class FisherDiagonal(Diagonal):
    """D = diagonal of the Fisher matrix on A, plus λ, relative to its maximum, and at least ε.

    The diagonal is the mean of the squared per-sample gradients (not the square of the mean
    gradient). A gradient that is zero everywhere gives D = 1. In D between ε and 1 a vector has a
    length like its own, so that small gradients make no products overflow in half precision.

    Args:
        epsilon: the floor relative to the largest entry; the paper's ε.
    """

    def __init__(self, epsilon: float = 1e-4) -> None:
        super().__init__(torch.empty(0))
        self.epsilon = epsilon

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """D alone."""
        return (self.diagonal,)

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """One walk over A for value, gradient and squares."""
        p, D = objective.parameters, self.diagonal
        # In the same place at every step, as long as it is of the same kind.
        if (D.numel(), D.dtype, D.device) != (p.numel, p.dtype, p.device):
            self.diagonal = p.empty()
        return objective.value_gradient_and_squares(data, into=self)

    def take_squares(self, parameters: FlatParameters, squares: Tensor) -> None:
        """Make D, in place.

        Args:
            parameters: of the model.
            squares: mean squared gradients [n]; overwritten.
        """
        parameters.add_decay_constant(squares)
        largest = squares.max()
        # Without a host decision: where the largest is zero, everything becomes one.
        one = torch.ones_like(largest)
        relative = squares.div_(torch.where(largest > 0, largest, one))
        floor = torch.where(largest > 0, self.epsilon * one, one)
        torch.clamp(relative, min=floor, out=self.diagonal)


class Identity:
    """D = 1: no preconditioning."""

    tensors: tuple[Tensor, ...] = ()

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """One walk over A for value and gradient."""
        return objective.value_and_gradient(data)

    def solve(self, vector: Tensor) -> Tensor:
        """The vector itself, copied."""
        return vector.clone()

    def multiply(self, vector: Tensor) -> Tensor:
        """The vector itself, copied."""
        return vector.clone()

    def part(self, part: slice) -> Entrywise:
        """The same for any part."""
        return self
