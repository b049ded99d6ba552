"""The objective as a function of a few coordinates: a → f_C(θ + V̄a).

What BFGS minimises in a step (paper, Algorithm 3, line 11), with the noise of its values
measured, not assumed: the search must go on until the noise and stop there, and what that is
depends on float64, float32, tf32 or bfloat16, on the model and on the number of samples.
"""

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from krylov_descent.batches import Samples
from krylov_descent.bfgs import Trying, Vector
from krylov_descent.exchanges import Ahead
from krylov_descent.noise import NOISE_POINTS, error_sums, noise_from, noise_steps
from krylov_descent.objective import Objective
from krylov_descent.recorded_objective import RecordedObjective, Taken
from krylov_descent.subspace import Coordinates, Subspace


class Combines(Protocol):
    """A basis V, however it is kept."""

    @property
    def rank(self) -> int:
        """How many vectors it has."""

    def combine(self, coefficients: Tensor) -> Tensor:
        """V c as a vector [n], for small c [r] (float64, CPU)."""


class ObjectiveAround:
    """What every f_C around θ has in common: how its points are reached, and what rounding costs.

    Args:
        objective: f.
        samples: the set C.
        theta: θ [n], an exact copy.
        basis: V.
        coordinates: of V̄.
    """

    samples: int
    samples_seen = 0

    def __init__(
        self,
        objective: Objective,
        samples: Samples,
        theta: Tensor,
        basis: Combines,
        coordinates: Coordinates,
    ) -> None:
        self._objective, self._set, self._theta = objective, samples, theta
        self._basis, self._coordinates = basis, coordinates

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        """Value and gradient V̄ᵀ∇f [r] at a [r]; one gradient over C."""
        raise NotImplementedError

    def foresee(self, trying: Trying) -> None:
        """Be told which trial of a search the next evaluation is for."""

    def start(self) -> tuple[float, Vector]:
        """The same at a = 0, with which a search begins."""
        return self(np.zeros(self._basis.rank))

    def direction(self, a: Vector) -> Tensor:
        """V̄a, a vector [n]."""
        return self._basis.combine(torch.from_numpy(self._coordinates.to_basis(a)))

    def take(self, a: Vector) -> Taken | None:
        """Move the parameters to θ + V̄a by one launch; None where there is no recording for that.

        Args:
            a: [r]; the last point that is asked for.
        """
        return None

    def value(self) -> float:
        """f_C at the parameters as they are."""
        return self._objective.value(self._set)

    def _move(self, a: Vector) -> None:
        self._objective.parameters.assign(self._theta + self.direction(a))

    def _least_noise(self, epsilon: float, value: float) -> float:
        """Where there is no neighbourhood to look at: rounding of the last operation alone."""
        return epsilon * abs(value) / math.sqrt(self.samples)


class SubspaceObjective(ObjectiveAround):
    """f_C over the coordinates of a subspace, around θ.

    Evaluating may write the point into the module's parameters, and leaves it there.

    Args:
        objective: f.
        samples: the set C.
        theta: θ [n], an exact copy.
        subspace: V.
        coordinates: of V̄.
        recorded: the same over the place of V, where there is a recording.

    Attributes:
        samples: |C|, known after the first evaluation.
        samples_seen: by all evaluations so far.
    """

    def __init__(
        self,
        objective: Objective,
        samples: Samples,
        theta: Tensor,
        subspace: Subspace,
        coordinates: Coordinates,
        recorded: RecordedObjective | None = None,
    ) -> None:
        super().__init__(objective, samples, theta, subspace, coordinates)
        if recorded is not None and not recorded.normaliser:
            recorded = None  # the objective says what is wrong
        self._subspace, self._recorded = subspace, recorded
        self._ahead: Ahead | None = None
        self.samples, self._normaliser = (
            (0, 1.0) if recorded is None else (recorded.samples, recorded.normaliser)
        )

    def start(self) -> tuple[float, Vector]:
        if self._recorded is None:
            return super().start()
        self._coordinates.find()  # while the GPU is busy with what was launched behind the basis
        value, projected = self._recorded.at_theta()
        self.samples_seen += self.samples
        return value, self._coordinates.from_gradient(projected[self._subspace.rows])

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        if self._recorded is None:
            self._move(a)
            found = self._objective.value_and_gradient(self._set)
            self.samples, self._normaliser = found.samples, found.normaliser
            value, projected = found.value, self._subspace.project(found.gradient).numpy()
        else:
            value, projected = self._recorded(self._coordinates.to_basis(a), self._ahead)
            projected = projected[: self._subspace.rank]
        self.samples_seen += self.samples
        return value, self._coordinates.from_gradient(projected)

    def foresee(self, trying: Trying) -> None:
        self._ahead = Ahead(trying, self._coordinates.from_basis)

    def noise(self, value: float, gradient: Vector) -> float:
        """Standard deviation of the rounding error of a value; four forward passes over C.

        On a GPU the evaluation at a = −gradient, with which a search goes on, is launched behind
        them.

        Args:
            value: at a = 0.
            gradient: there [r].
        """
        sums = self._error_sums_by_recording(gradient)
        if sums is None:
            sums = self._error_sums_along(gradient)
        self.samples_seen += NOISE_POINTS * self.samples
        if not np.isfinite(sums.numpy()).all():
            return self._least_noise(self._objective.findings.epsilon, value)
        return noise_from(sums) / self._normaliser

    def take(self, a: Vector) -> Taken | None:
        if self._recorded is None:
            return None
        return self._recorded.take(self._coordinates.to_basis(a))

    def _error_sums_by_recording(self, gradient: Vector) -> Tensor | None:
        if self._recorded is None:
            return None
        along = self._coordinates.to_basis(gradient)
        sums = self._recorded.launch_noise(along)
        if sums is None:
            return None
        # As BFGS begins: with the unit matrix and a step of 1.
        slope, matrix = -float(gradient @ gradient), np.eye(len(gradient))
        first = Trying(np.zeros_like(gradient), gradient, -gradient, slope, 1.0, matrix, True)
        self._recorded.launch_ahead(-along, Ahead(first, self._coordinates.from_basis))
        return sums.tensor()

    def _error_sums_along(self, direction: Vector) -> Tensor:
        """Of the per-sample losses at points along a direction [r], on the CPU.

        Where C comes in another order each time, of their sums.
        """
        rows = []
        for step in noise_steps(self._objective.findings.epsilon):
            self._move(step * direction)
            rows.append(self._objective.comparable_losses(self._set))
        return error_sums(torch.stack(rows))
