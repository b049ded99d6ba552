"""The objective as a function of a few coordinates: a → f_C(θ + V̄a).

What BFGS minimises in a step (paper, Algorithm 3, line 11), with the noise of its values
measured, not assumed: the search must go on until the noise and stop there, and what that is
depends on float64, float32, tf32 or bfloat16, on the model and on the number of samples.
"""

import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import Vector
from krylov_descent.algorithms.noise import (
    NOISE_POINTS,
    error_sums,
    noise_from,
    noise_steps,
    settled_noise,
)
from krylov_descent.algorithms.subspace import Coordinates, Subspace
from krylov_descent.cuda.graphs.record_search import RecordedObjective, Taken
from krylov_descent.objective.batches import Samples
from krylov_descent.objective.objective import Objective


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

    def noise(self, value: float, gradient: Vector, previous: Callable[[], Tensor]) -> float:
        """Standard deviation of the rounding error of a value; four forward passes over C.

        Measured along the previous step: that is as long as steps are here, and known before there
        is a basis. Where it tells nothing, or so much that a search would end before it begins, the
        step with which a search begins is asked, too. By itself that is no measure: it may be
        hundreds of times as long as what comes of the search, and the noise thousands of times.

        Args:
            value: at a = 0.
            gradient: there [r].
            previous: the last step of the optimiser [n], zeros where there is none.
        """
        epsilon = self._objective.epsilon()
        limit = math.sqrt(epsilon) * abs(value)
        noise = self._noise_along_previous(previous, epsilon, limit)
        predicted_decrease = float(gradient @ gradient) / 2
        if not 0 < noise < predicted_decrease:
            first = self.direction(gradient)
            again = settled_noise(lambda part: self._noise_along(first, part, epsilon), limit)
            noise = min(noise or math.inf, again or math.inf)  # of what tells something
        if math.isfinite(noise):
            return noise
        # There is no neighbourhood to look at: rounding of the last operation alone.
        return epsilon * abs(value) / math.sqrt(self.samples)

    def _noise_along_previous(
        self, previous: Callable[[], Tensor], epsilon: float, limit: float
    ) -> float:
        """Along the previous step; 0 where that tells nothing."""
        step = previous()
        if not bool(step.any()):
            return 0.0
        return settled_noise(lambda part: self._noise_along(step, part, epsilon), limit)

    def _noise_along(self, direction: Tensor, part: float, epsilon: float) -> float:
        """At `noise_steps` along a part of a step [n]; not finite where a loss is not."""
        raise NotImplementedError

    def _move(self, a: Vector) -> None:
        self._move_by(self.direction(a))

    def _move_by(self, step: Tensor) -> None:
        self._objective.parameters.assign(self._theta + step)


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
            value, projected = self._recorded(self._coordinates.to_basis(a))
            projected = projected[: self._subspace.rank]
        self.samples_seen += self.samples
        return value, self._coordinates.from_gradient(projected)

    def noise(self, value: float, gradient: Vector, previous: Callable[[], Tensor]) -> float:
        """As `ObjectiveAround` has it; and the evaluation that a search goes on with is launched.

        With recordings that is, by which the noise was measured while the host did something else.
        """
        noise = super().noise(value, gradient, previous)
        if self._recorded is not None:
            # As BFGS begins: with the unit matrix and a step of 1.
            self._recorded.launch_ahead(self._coordinates.to_basis(-gradient))
        return noise

    def take(self, a: Vector) -> Taken | None:
        if self._recorded is None:
            return None
        return self._recorded.take(self._coordinates.to_basis(a))

    def _noise_along_previous(
        self, previous: Callable[[], Tensor], epsilon: float, limit: float
    ) -> float:
        sums = None if self._recorded is None else self._recorded.noise
        if sums is None:
            return super()._noise_along_previous(previous, epsilon, limit)
        recorded = self._noise_from(sums.tensor())
        return settled_noise(
            lambda part: recorded if part == 1 else self._noise_along(previous(), part, epsilon),
            limit,
        )

    def _noise_along(self, direction: Tensor, part: float, epsilon: float) -> float:
        rows = []
        for back in noise_steps(epsilon):
            self._move_by(part * back * direction)
            # Where C comes in another order each time, their sums alone.
            rows.append(self._objective.comparable_losses(self._set))
        return self._noise_from(error_sums(torch.stack(rows)))

    def _noise_from(self, sums: Tensor) -> float:
        self.samples_seen += NOISE_POINTS * self.samples
        return noise_from(sums) / self._normaliser
