"""The objective in the subspace, where samples or basis are spread over ranks or kept elsewhere.

What `subspace_objective` is for one process with its basis at hand. Each rank evaluates its part
of C, projects its part of the gradient, and sends the few numbers that come of it: value and
projected gradient. No parameter vector is sent, unless the basis itself is sharded.
"""

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import Vector
from krylov_descent.algorithms.noise import NOISE_POINTS, noise_over_ranks, noise_steps
from krylov_descent.algorithms.stored_subspace import StoredSubspace
from krylov_descent.algorithms.subspace import Coordinates
from krylov_descent.objective.batches import Samples
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.ksd.search_objective import ObjectiveAround


class SpreadObjective(ObjectiveAround):
    """f_C over the coordinates of a subspace, around θ.

    Evaluating writes the point into the module's parameters and leaves it there.

    Args:
        objective: f.
        samples: this rank's part of C; the whole of it without a process group.
        theta: θ [n], an exact copy.
        subspace: V.
        coordinates: of V̄.

    Attributes:
        samples: |C| on all ranks together.
        samples_seen: by all evaluations so far, on all ranks together.
    """

    def __init__(
        self,
        objective: Objective,
        samples: Samples,
        theta: Tensor,
        subspace: StoredSubspace,
        coordinates: Coordinates,
    ) -> None:
        super().__init__(objective, samples, theta, subspace, coordinates)
        self._subspace, self._ranks = subspace, objective.ranks
        whole = objective.count(samples)
        self.samples, self._normaliser = whole.samples, whole.normaliser

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        """Value and gradient V̄ᵀ∇f [r] at a [r]; one gradient over C.

        Sends r + 1 numbers.
        """
        self._move(a)
        part = self._objective.part_of_value_and_gradient(self._set, self._normaliser)
        projected = self._subspace.project(part.gradient).numpy()
        own = np.concatenate([[part.value], self._coordinates.from_gradient(projected)])
        total = self._ranks.sum_numbers(torch.from_numpy(own)).numpy()
        self.samples_seen += self.samples
        return float(total[0]), total[1:]

    def _noise_along(self, direction: Tensor, part: float, epsilon: float) -> float:
        rows = []
        for back in noise_steps(epsilon):
            self._move_by(part * back * direction)
            with self._ranks.own_work():
                rows.append(self._objective.comparable_losses(self._set))
            self.samples_seen += self.samples
        return noise_over_ranks(rows, NOISE_POINTS, self._ranks) / self._normaliser
