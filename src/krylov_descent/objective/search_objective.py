"""The objective as a function of a few coordinates: a → f_C(θ + V̄a).

This is what BFGS minimises in a step (paper, Algorithm 3, line 11). The noise of its values is
measured, not assumed: the search must go on until the noise and stop there. How large the noise is
depends on float64, float32, tf32 or bfloat16, on the model and on the number of samples.

With several ranks each one evaluates its part of C, projects its part of the gradient, and sends
value and projected gradient. No vector of parameters is sent, unless the basis itself is sharded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import Vector
from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.algorithms.noise import (
    NOISE_POINTS,
    noise_over_ranks,
    noise_steps,
    settled_noise,
)
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.objective.batches import Samples
from krylov_descent.objective.objective import Objective


@dataclass(frozen=True, slots=True)
class Taken:
    """A step d by which the parameters were moved.

    Attributes:
        pieces: of d, new tensors like the parameters.
        norm: ‖d‖ in their precision.
    """

    pieces: list[Tensor]
    norm: float


class SearchObjective:
    """f_C over the coordinates of a subspace, around θ.

    Evaluating may write the point into the module's parameters, and leaves it there.

    Args:
        objective: f.
        samples: the set C; with several ranks this rank's part of it.
        previous: gives the last step of the optimiser [n], zeros if there is none.
        theta: a copy of the parameters [n], where there is one; else it is made.

    Attributes:
        theta: θ [n], an exact copy of the parameters.
        samples: |C| on all ranks together, known after the first evaluation.
        samples_seen: by all evaluations so far, on all ranks together.
    """

    def __init__(
        self,
        objective: Objective,
        samples: Samples,
        previous: Callable[[], Tensor],
        theta: Tensor | None = None,
    ) -> None:
        self._objective, self._set, self._previous = objective, samples, previous
        self._ranks = objective.ranks
        self.theta = objective.parameters.copy() if theta is None else theta
        self.samples, self.samples_seen, self._normaliser = 0, 0, 1.0
        self._subspace: Subspace
        self._coordinates: Coordinates

    def over(self, subspace: Subspace, coordinates: Coordinates) -> "SearchObjective":
        """The same in the coordinates of a subspace, which it takes before the first evaluation."""
        self._subspace, self._coordinates = subspace, coordinates
        if self._ranks.together:  # parts of means are divided by what all ranks have
            whole = self._objective.count(self._set)
            self.samples, self._normaliser = whole.samples, whole.normaliser
        return self

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        """Value and gradient V̄ᵀ∇f [r] at a [r]; one gradient over C. Ranks send r + 1 numbers."""
        self._move_by(self.direction(a))
        if self._ranks.together:
            found = self._objective.part_of_value_and_gradient(self._set, self._normaliser)
        else:
            found = self._objective.walk(self._set)
            self.samples, self._normaliser = found.samples, found.normaliser
        projected = self._subspace.project(found.gradient).numpy()
        value, gradient = found.value, self._coordinates.from_gradient(projected)
        self.samples_seen += self.samples
        if self._ranks.together:
            own = torch.from_numpy(np.concatenate([[value], gradient]))
            value, *total = self._ranks.sum_numbers(own).tolist()
            gradient = np.array(total)
        return value, gradient

    def start(self) -> tuple[float, Vector]:
        """Value and gradient at a = 0, with which a search begins."""
        return self(np.zeros(self._subspace.rank))

    def direction(self, a: Vector) -> Tensor:
        """V̄a, a vector [n]."""
        return self._subspace.combine(torch.from_numpy(self._coordinates.to_basis(a)))

    def take(self, a: Vector) -> Taken:
        """Move the parameters to θ + V̄a, a [r]; the last point that is asked for."""
        return self.take_step(self._ranks.agreed(self.direction(a)))

    def take_step(self, step: Tensor) -> Taken:
        """Move the parameters to θ + step, a vector [n] that is the same on all ranks."""
        parameters = self._objective.parameters
        norm = float(step.norm())
        parameters.assign(self.theta + step)
        return Taken(parameters.copied_pieces(step), norm)

    def restore(self) -> None:
        """Write θ into the parameters, bit for bit."""
        self._objective.parameters.assign(self.theta)

    def value(self) -> float:
        """f_C at the parameters as they are."""
        return self._objective.value(self._set)

    def noise(self, value: float, gradient: Vector) -> float:
        """Standard deviation of the rounding error of a value; four forward passes over C.

        Measured along the previous step: that is as long as steps are here, and known before there
        is a basis. Where it tells nothing, or so much that a search would end before it begins, the
        step with which a search begins is asked, too. By itself that is no measure: it may be
        hundreds of times as long as what comes of the search, and the noise thousands of times.

        Args:
            value: at a = 0.
            gradient: there [r].
        """
        epsilon = self._objective.epsilon()
        limit = math.sqrt(epsilon) * abs(value)
        noise = self._noise_along_previous(epsilon, limit)
        predicted_decrease = float(gradient @ gradient) / 2
        if not 0 < noise < predicted_decrease:
            first = self.direction(gradient)
            again = settled_noise(lambda part: self._noise_along(first, part, epsilon), limit)
            noise = min(noise or math.inf, again or math.inf)  # of what tells something
        if math.isfinite(noise):
            return noise
        # There is no neighbourhood to look at: rounding of the last operation alone.
        return epsilon * abs(value) / math.sqrt(self.samples)

    def _noise_along_previous(self, epsilon: float, limit: float) -> float:
        """Along the previous step; 0 where that tells nothing."""
        step = self._previous()
        if not bool(step.any()):
            return 0.0
        return settled_noise(lambda part: self._noise_along(step, part, epsilon), limit)

    def _noise_along(self, direction: Tensor, part: float, epsilon: float) -> float:
        """At `noise_steps` along a part of a step [n]; NaN where a loss is not finite."""
        rows = []
        for back in noise_steps(epsilon):
            self._move_by(part * back * direction)
            with self._ranks.own_work():
                # Where C comes in another order each time, their sums alone.
                rows.append(self._objective.comparable_losses(self._set))
        self.samples_seen += NOISE_POINTS * self.samples
        return noise_over_ranks(rows, NOISE_POINTS, self._ranks) / self._normaliser

    def _move_by(self, step: Tensor) -> None:
        self._objective.parameters.assign(self.theta + step)


@dataclass(frozen=True, slots=True)
class Search:
    """The work of preparing the search on C. It reads the parameters as they are.

    Attributes:
        objective: f.
        samples: the set C.
        previous: gives the last step of the optimiser [n], zeros if there is none.
    """

    objective: Objective
    samples: Samples
    previous: Callable[[], Tensor]

    def run(self) -> SearchObjective:
        """Copy θ; evaluations come when they are asked for."""
        return SearchObjective(self.objective, self.samples, self.previous)
