"""The objective as a function of a few coordinates: a → f_C(θ + V̄a).

BFGS minimises this function in a step (paper, Algorithm 3, line 11). The search must continue down
to the rounding noise of the function's values and stop there. So the noise is measured. It depends
on the precision (float64, float32, tf32 or bfloat16), on the model and on the number of samples.

With several ranks, each rank evaluates its part of C and projects its part of the gradient. Ranks
sum values and projected gradients. No vector [n] is sent, unless the basis itself is sharded.
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
    """A step d that was added to the parameters.

    Attributes:
        pieces: the pieces of d, as new tensors like the parameters.
        norm: ‖d‖, computed in the dtype of the parameters.
    """

    pieces: list[Tensor]
    norm: float


class SearchObjective:
    """f_C over the coordinates of a subspace, around θ.

    An evaluation may overwrite the module's parameters with the point it evaluates.

    Args:
        objective: f.
        samples: the set C; with several ranks this rank's part of C.
        previous: returns the last step of the optimiser [n], zeros if there is none.
        theta: a copy of the parameters [n]; made here if None.

    Attributes:
        theta: θ [n], an exact copy of the parameters.
        samples: |C| over all ranks, known after the first evaluation.
        samples_seen: the samples of all evaluations so far, over all ranks.
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
        """Set the subspace and its coordinates, before the first evaluation; returns itself."""
        self._subspace, self._coordinates = subspace, coordinates
        if self._ranks.together:  # each rank divides its part by the total Σ wᵢ
            whole = self._objective.count(self._set)
            self.samples, self._normaliser = whole.samples, whole.normaliser
        return self

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        """Value and gradient V̄ᵀ∇f [r] at a [r].

        Cost: one gradient over C; with several ranks an all-reduce of r + 1 numbers.
        """
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
        """Value and gradient [r] at a = 0, where a search begins."""
        return self(np.zeros(self._subspace.rank))

    def direction(self, a: Vector) -> Tensor:
        """V̄a, a vector [n]."""
        return self._subspace.combine(torch.from_numpy(self._coordinates.to_basis(a)))

    def take(self, a: Vector) -> Taken:
        """Move the parameters to θ + V̄a, a [r]. Call this last."""
        return self.take_step(self._ranks.agreed(self.direction(a)))

    def take_step(self, step: Tensor) -> Taken:
        """Move the parameters to θ + step. The vector `step` [n] must be equal on all ranks."""
        parameters = self._objective.parameters
        norm = float(step.norm())
        parameters.assign(self.theta + step)
        return Taken(parameters.copied_pieces(step), norm)

    def restore(self) -> None:
        """Write θ into the parameters, bit for bit."""
        self._objective.parameters.assign(self.theta)

    def value(self) -> float:
        """f_C at the current parameters."""
        return self._objective.value(self._set)

    def noise(self, value: float, gradient: Vector) -> float:
        """Standard deviation of the rounding error of a value; at least four forward passes over C.

        The noise is measured along the previous step of the optimiser, which has a typical length
        and is known before the basis. If that measurement is inconclusive, or so large that the
        search would end at once, the noise is also measured along the first step of the search,
        and the smaller estimate counts. The first step alone is a poor measure: it may be hundreds
        of times as long as the result of the search, and its noise thousands of times as large.

        Args:
            value: f_C at a = 0.
            gradient: the gradient at a = 0 [r].
        """
        epsilon = self._objective.epsilon()
        limit = math.sqrt(epsilon) * abs(value)
        noise = self._noise_along_previous(epsilon, limit)
        predicted_decrease = float(gradient @ gradient) / 2
        if not 0 < noise < predicted_decrease:
            first = self.direction(gradient)
            again = settled_noise(lambda part: self._noise_along(first, part, epsilon), limit)
            noise = min(noise or math.inf, again or math.inf)  # ignore inconclusive zeros
        if math.isfinite(noise):
            return noise
        # No measurement is conclusive: assume the rounding of the last operation alone.
        return epsilon * abs(value) / math.sqrt(self.samples)

    def _noise_along_previous(self, epsilon: float, limit: float) -> float:
        """Noise along the previous step; 0 if there is none, infinity if inconclusive."""
        step = self._previous()
        if not bool(step.any()):
            return 0.0
        return settled_noise(lambda part: self._noise_along(step, part, epsilon), limit)

    def _noise_along(self, direction: Tensor, part: float, epsilon: float) -> float:
        """Noise at `noise_steps` along part · direction [n]; NaN if a loss is not finite."""
        rows = []
        for back in noise_steps(epsilon):
            self._move_by(part * back * direction)
            with self._ranks.own_work():
                # A sum instead of single losses if the order of C may change between passes.
                rows.append(self._objective.comparable_losses(self._set))
        self.samples_seen += NOISE_POINTS * self.samples
        return noise_over_ranks(rows, NOISE_POINTS, self._ranks) / self._normaliser

    def _move_by(self, step: Tensor) -> None:
        self._objective.parameters.assign(self.theta + step)


@dataclass(frozen=True, slots=True)
class Search:
    """Work for an engine: prepare the search on C around the current parameters.

    Attributes:
        objective: f.
        samples: the set C.
        previous: returns the last step of the optimiser [n], zeros if there is none.
    """

    objective: Objective
    samples: Samples
    previous: Callable[[], Tensor]

    def run(self) -> SearchObjective:
        """Copy θ. Nothing is evaluated yet."""
        return SearchObjective(self.objective, self.samples, self.previous)
