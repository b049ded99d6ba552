"""The objective as a function of a few coordinates: a → f_C(θ + V̄a).

What BFGS minimises in a step (paper, Algorithm 3, line 11), with the noise of its values
measured, not assumed: the search must go on until the noise and stop there, and what that is
depends on float64, float32, tf32 or bfloat16, on the model and on the number of samples.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent.batches import Batch, Samples
from krylov_descent.bfgs import Vector
from krylov_descent.cuda_graphs import Recording
from krylov_descent.linear_layers import losses_and_gradients, side_by_side
from krylov_descent.network import Network
from krylov_descent.noise import error_sums, noise_from
from krylov_descent.objective import Objective
from krylov_descent.subspace import Coordinates, Subspace

NOISE_POINTS = 4
# Names of recordings.
EVALUATION, NOISE = "evaluation", "noise"


class Combines(Protocol):
    """A basis V, however it is kept."""

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

    def direction(self, a: Vector) -> Tensor:
        """V̄a, a vector [n]."""
        return self._basis.combine(torch.from_numpy(self._coordinates.to_basis(a)))

    def value(self) -> float:
        """f_C at the parameters as they are."""
        return self._objective.value(self._set)

    def _move(self, a: Vector) -> None:
        self._objective.parameters.assign(self._theta + self.direction(a))

    def _least_noise(self, epsilon: float, value: float) -> float:
        """Where there is no neighbourhood to look at: rounding of the last operation alone."""
        return epsilon * abs(value) / math.sqrt(self.samples)


def noise_steps(epsilon: float) -> list[float]:
    """Steps a little apart along the gradient at the start, for measuring noise.

    What is left of the values there after third differences is noise, if the points are so close
    that the objective itself is a quadratic. In these coordinates a full step is about the
    gradient's length; a fraction of a tenth of ε^⅓ of that makes the cubic part a thousandth of
    the rounding.
    """
    spacing = 0.1 * epsilon ** (1 / 3)
    return [-k * spacing for k in range(NOISE_POINTS)]


class SubspaceObjective(ObjectiveAround):
    """f_C over the coordinates of a subspace, around θ.

    Evaluating writes the point into the module's parameters and leaves it there. On a GPU an
    evaluation is one recording (see `recordings`), which fetches the coefficients from the host and
    brings value and projected gradient there.

    Args:
        objective: f.
        samples: the set C.
        theta: θ [n], an exact copy.
        subspace: V.
        coordinates: of V̄.

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
    ) -> None:
        super().__init__(objective, samples, theta, subspace, coordinates)
        self._subspace = subspace
        self.samples, self._normaliser = 0, 1.0
        batch = None if subspace.slots is None else objective.single_batch(samples)
        self._evaluation = None if batch is None else self._record_evaluation(batch)
        self._batch = batch

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        """Value and gradient V̄ᵀ∇f [r] at a [r]; one gradient over C."""
        if self._evaluation is None:
            self._move(a)
            found = self._objective.value_and_gradient(self._set)
            self.samples, self._normaliser = found.samples, found.normaliser
            value, projected = found.value, self._subspace.project(found.gradient).numpy()
        else:
            rank = self._subspace.rank
            coefficients, numbers = (tensor.numpy() for tensor in self._evaluation.result)
            coefficients[:rank] = self._coordinates.to_basis(a)
            coefficients[rank:] = 0  # of unused slots
            self._evaluation()
            self._coordinates.find()  # at the start, while the GPU is busy with it
            torch.cuda.current_stream(self._theta.device).synchronize()
            value, projected = float(numbers[0]), numbers[1 : 1 + rank]
        self.samples_seen += self.samples
        return value, self._coordinates.from_gradient(projected)

    def noise(self, value: float, gradient: Vector) -> float:
        """Standard deviation of the rounding error of a value; four forward passes over C.

        Args:
            value: at a = 0.
            gradient: there [r].
        """
        epsilon: float = self._objective.findings.epsilon
        sums = self._error_sums_along(gradient, noise_steps(epsilon))
        self.samples_seen += NOISE_POINTS * self.samples
        if not bool(sums.isfinite().all()):
            return self._least_noise(epsilon, value)
        return noise_from(sums) / self._normaliser

    def _error_sums_along(self, direction: Vector, steps: list[float]) -> Tensor:
        """Of the per-sample losses at points along a direction [r], on the CPU.

        Where C comes in another order each time, of their sums.
        """
        recording = None
        slots = self._subspace.slots
        if self._evaluation is not None and self._batch is not None and slots is not None:
            along = np.zeros(len(slots))
            along[: len(direction)] = self._coordinates.to_basis(direction)
            recording = self._record_error_sums(self._batch, along, steps)
        if recording is not None:
            found: Tensor = recording().cpu()
            return found
        rows = []
        for step in steps:
            self._move(step * direction)
            rows.append(self._objective.comparable_losses(self._set))
        return error_sums(torch.stack(rows))

    # Recordings -----------------------------------------------------------------------------

    def _record_evaluation(self, batch: Batch) -> Recording | None:
        slots, theta = self._subspace.slots, self._theta
        assert slots is not None
        self.samples = batch.size
        self._normaliser = float(self._objective.network.loss.normaliser(batch.targets, batch.size))
        if not self._normaliser:  # the objective says what is wrong
            return None

        @cache
        def on_host() -> tuple[Tensor, Tensor]:
            """Where coefficients and results are; made before the recording, and held by it."""
            coefficients = torch.zeros(len(slots), dtype=slots.dtype, pin_memory=True)
            return coefficients, torch.zeros(1 + len(slots), dtype=torch.float64, pin_memory=True)

        def evaluate(
            network: Network, batch: Batch, theta: Tensor, normaliser: Tensor
        ) -> tuple[Tensor, Tensor]:
            # Copies are part of the recording: each would be a launch of its own.
            coefficients, numbers = on_host()
            parameters = network.parameters
            c = coefficients.to(slots.device, non_blocking=True)
            point = torch.addmv(theta, slots.t(), c)
            parameters.assign(point)
            jobs: list[Callable[[], Any]] = [
                partial(losses_and_gradients, network, batch),
                parameters.decay_term,
            ]
            (losses, gradients), decay = side_by_side(jobs)
            # In one dtype, and of whole vectors: other kernels take two to five times as long.
            gradient = parameters.flatten(gradients).mul_(normaliser.reciprocal().to(theta.dtype))
            parameters.add_decay(gradient, point)
            value = losses.sum(dtype=torch.float64) / normaliser + decay
            found = torch.cat([value.unsqueeze(0), (slots @ gradient).double()])
            numbers.copy_(found, non_blocking=True)
            return coefficients, numbers

        return self._objective.recordings.load(
            EVALUATION,
            evaluate,
            batch,
            theta,
            theta.new_full((), self._normaliser, dtype=torch.float64),
            fixed=(slots,),
        )

    def _record_error_sums(
        self, batch: Batch, along: Vector, steps: list[float]
    ) -> Recording | None:
        slots, theta = self._subspace.slots, self._theta
        assert slots is not None
        apart = self._may_be_side_by_side(batch)

        def error_sums_at_points(
            network: Network, batch: Batch, theta: Tensor, numbers: Tensor
        ) -> Tensor:
            along, lengths = numbers.split([len(slots), len(steps)])
            direction = slots.t() @ along

            def losses_at(length: Tensor) -> Tensor:
                point = torch.addcmul(theta, direction, length)
                return network.losses_at(point, batch).detach().double()

            jobs = [partial(losses_at, length) for length in lengths]
            with self._objective.value_mode():
                losses = side_by_side(jobs) if apart else [job() for job in jobs]
            return error_sums(torch.stack(losses))

        return self._objective.recordings.load(
            NOISE,
            error_sums_at_points,
            batch,
            theta,
            torch.from_numpy(np.concatenate([along, steps])).to(slots),
            fixed=(slots,),
        )

    def _may_be_side_by_side(self, batch: Batch) -> bool:
        """Whether the forward passes for the noise fit side by side, and write to nothing shared.

        What one writes to a tensor that is no buffer, and reads again, is not seen. Then the noise
        may be wrong, and nothing else.
        """
        objective = self._objective
        modules = (objective.network.eager, objective.network.loss.module)
        shared = any(True for m in modules if isinstance(m, nn.Module) for _ in m.buffers())
        graphs = objective.findings.forward_differentiates
        return not (shared or graphs) and objective.may_record(batch, times=NOISE_POINTS)
