"""Preconditioners D, which generate the Krylov space (paper, Section 4) and define its metric.

A preconditioner is updated once per step, in the walk over set A that computes the gradient. Then
it multiplies vectors with D and D⁻¹. KSD needs D only up to a constant factor. With a largest entry
of about 1, numbers stay within the range of half precision.
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
    """The interface that KSD requires: any object with these three methods will do.

    Before each step KSD saves the attributes of a user's preconditioner and copies the tensors in
    them. If the step fails, KSD restores them. In a step the objective may be multiplied by a power
    of two, `objective.scale`.
    """

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """Walk over A once, make D, and return the value and gradient found on the way.

        `objective.value_and_gradient(data)` returns such an evaluation. The data may be a stream
        that can be read only once.
        """


@runtime_checkable
class EntrywisePreconditioner(Preconditioner, Entrywise, Protocol):
    """A preconditioner that acts on each entry of a vector separately."""


@runtime_checkable
class InPlace(Preconditioner, Protocol):
    """A preconditioner whose tensors keep their memory, and that reads none of them on the host."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that `solve` and `multiply` read; every step updates them in place."""


@runtime_checkable
class FromCurvatureSet(Preconditioner, Protocol):
    """A preconditioner that needs the samples of B, which are drawn in the walk over A."""

    def learn(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """Make D, given this rank's samples of B on the device of the parameters."""


class FisherDiagonal(Diagonal):
    """D = diagonal of the Fisher matrix on A, plus λ, divided by its maximum, and at least ε.

    With an exponent, D is a power of that.

    The diagonal is the mean of the squared per-sample gradients (not the square of the mean
    gradient); outside of Linear layers, an unbiased estimate of it (see `squared_gradients`). A
    gradient that is zero everywhere gives D = 1. With entries between ε and 1, the length of a
    vector in D is similar to its own length, so small gradients make no products overflow in half
    precision.

    Args:
        epsilon: the floor relative to the largest entry; the paper's ε.
        exponent: of the entries; the paper has 1.
    """

    def __init__(self, epsilon: float = 1e-4, *, exponent: float = 1.0) -> None:
        super().__init__(torch.empty(0))
        self.epsilon, self.exponent = epsilon, exponent

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """D alone."""
        return (self.diagonal,)

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """Walk over A once for value, gradient and squared gradients."""
        p, D = objective.parameters, self.diagonal
        # All steps use the same tensor while its size, dtype and device fit.
        if (D.numel(), D.dtype, D.device) != (p.numel, p.dtype, p.device):
            self.diagonal = p.empty()
        return objective.value_gradient_and_squares(data, into=self)

    def take_squares(self, parameters: FlatParameters, squares: Tensor) -> None:
        """Compute D in place.

        Args:
            parameters: of the model.
            squares: mean squared gradients [n]; overwritten.
        """
        parameters.add_decay_constant(squares)
        largest = squares.max()
        # The device decides, so that the host need not wait: if the largest is zero, D becomes one.
        one = torch.ones_like(largest)
        relative = squares.div_(torch.where(largest > 0, largest, one))
        floor = torch.where(largest > 0, self.epsilon * one, one)
        torch.clamp(relative, min=floor, out=self.diagonal)
        if self.exponent != 1:
            self.diagonal.pow_(self.exponent)

    def raise_to(self, exponent: float) -> None:
        """Change the exponent, of the present D as of later ones."""
        self.diagonal.pow_(exponent / self.exponent)
        self.exponent = exponent


class Identity:
    """D = 1: no preconditioning."""

    tensors: tuple[Tensor, ...] = ()

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """Walk over A once for value and gradient."""
        return objective.value_and_gradient(data)

    def solve(self, vector: Tensor) -> Tensor:
        """The vector itself, copied."""
        return vector.clone()

    def multiply(self, vector: Tensor) -> Tensor:
        """The vector itself, copied."""
        return vector.clone()

    def part(self, part: slice) -> Entrywise:
        """D = 1 for any part of a vector."""
        return self
