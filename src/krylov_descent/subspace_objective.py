"""The objective as a function of a few coordinates: a → f_C(θ + V̄a).

What BFGS minimises in a step (paper, Algorithm 3, line 11), with the noise of its values
measured, not assumed: the search must go on until the noise and stop there, and what that is
depends on float64, float32, tf32 or bfloat16, on the model and on the number of samples.
"""

import math

import torch
from torch import Tensor

from krylov_descent.batches import Samples
from krylov_descent.noise import noise_of_sum
from krylov_descent.objective import Objective
from krylov_descent.repeated import RepeatedObjective
from krylov_descent.subspace import Coordinates, Subspace

NOISE_POINTS = 4


class SubspaceObjective:
    """f_C over the coordinates of a subspace, around θ.

    Evaluating writes the point into the module's parameters and leaves it there.

    Args:
        objective: f.
        samples: the set C.
        theta: θ [n], an exact copy.
        subspace: V.
        coordinates: C of Ĥ = CCᵀ.
    """

    def __init__(
        self,
        objective: Objective,
        samples: Samples,
        theta: Tensor,
        subspace: Subspace,
        coordinates: Coordinates,
    ) -> None:
        self._objective, self._theta = objective, theta
        self._on_samples = RepeatedObjective(objective, samples)
        self._subspace, self._coordinates = subspace, coordinates
        self.samples, self.samples_seen, self._normaliser = 0, 0, 1.0

    def direction(self, a: Tensor) -> Tensor:
        """V̄a, a vector [n]."""
        return self._subspace.combine(self._coordinates.to_basis(a))

    def __call__(self, a: Tensor) -> tuple[float, Tensor]:
        """Value and gradient V̄ᵀ∇f [r] in float64 on the CPU at a [r]; one gradient over C."""
        self._move(a)
        found = self._on_samples.value_and_gradient()
        self.samples, self._normaliser = found.samples, found.normaliser
        self.samples_seen += found.samples
        return found.value, self._coordinates.from_gradient(self._subspace.project(found.gradient))

    def noise(self, value: float, gradient: Tensor) -> float:
        """Standard deviation of the rounding error of a value; four forward passes over C.

        Values at points a little apart along the first direction: what is left of them after
        third differences is noise, if the points are so close that the objective itself is a
        quadratic there. In these coordinates a full step is about the gradient's length; a
        fraction of a tenth of ε^⅓ of that makes the cubic part a thousandth of the rounding.
        """
        epsilon: float = self._objective.findings.epsilon
        spacing = 0.1 * epsilon ** (1 / 3)
        rows = []
        for k in range(NOISE_POINTS):
            self._move(gradient * (-k * spacing))
            rows.append(self._on_samples.losses())
            self.samples_seen += rows[-1].numel()
        values = torch.stack(rows)
        if not bool(values.isfinite().all()):
            # No neighbourhood to look at; rounding of the last operation is the least there is.
            return epsilon * abs(value) / math.sqrt(self.samples)
        return noise_of_sum(values) / self._normaliser

    def value(self) -> float:
        """f_C at the parameters as they are."""
        return self._objective.value(self._on_samples.samples)

    def _move(self, a: Tensor) -> None:
        self._objective.parameters.assign(self._theta + self.direction(a))
