"""f_C over a basis that is in the same place at every step, by recordings: c → f_C(θ + Vc).

What a search on a GPU asks for, with little for the host to do: an evaluation is one launch, which
fetches the coefficients from the host and brings value and projected gradient there, and so are the
measurement of noise and the step that is taken in the end. They are made ready while the GPU is
busy with the basis, and the evaluation with which every search begins, c = 0, is launched right
behind that: it is the same whatever the basis turns out to be. Any other point that will probably
be asked for can be launched ahead, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent.batches import Batch, Samples
from krylov_descent.bfgs import Vector
from krylov_descent.branches import side_by_side
from krylov_descent.cuda_graphs import Part, Recording
from krylov_descent.linear_layers import losses_and_gradients
from krylov_descent.noise import NOISE_POINTS, ORDER, error_sums, noise_steps
from krylov_descent.objective import Objective
from krylov_descent.on_the_way import Arriving, OnTheWay
from krylov_descent.recordings import Aliased
from krylov_descent.tensor_cores.entry import under_way
from krylov_descent.tensor_cores.transfers import brought, fetched

# Names of recordings.
EVALUATION, NOISE, STEP = "evaluation", "noise", "step"


def launched_objective(
    objective: Objective, samples: Samples, theta: Tensor, slots: Tensor
) -> "RecordedObjective | None":
    """f_C, whose evaluation at θ is under way; None where it cannot be recorded.

    Args:
        objective: f.
        samples: the set C.
        theta: θ [n].
        slots: V as rows [K + m, n], which the GPU may be busy with still.
    """
    batch, recordings = objective.single_batch(samples), objective.recordings
    if batch is None:
        return None
    found = objective.network.loss.normaliser(batch.targets, batch.size)
    # By a kernel, where it is a number: a copy would wait for all before it.
    normaliser = (
        found if isinstance(found, Tensor) else theta.new_full((), found, dtype=torch.float64)
    )
    evaluation = recordings.load(
        EVALUATION, _evaluation(slots), batch, theta, normaliser, fixed=(slots,)
    )
    if evaluation is None:
        return None
    noise = recordings.beside(evaluation, NOISE, _error_sums(objective, slots), fixed=(slots,))
    step = recordings.beside(evaluation, STEP, _step(slots), fixed=(slots,))
    return RecordedObjective(
        objective, evaluation, noise, step, samples=batch.size, normaliser=OnTheWay(normaliser)
    )


@dataclass(frozen=True, slots=True)
class Taken:
    """A step d, by which the parameters were moved.

    Attributes:
        pieces: of d, new tensors like the parameters.
        norm: ‖d‖, which may be on its way.
    """

    pieces: list[Tensor]
    norm: Arriving


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """An evaluation that was launched.

    Attributes:
        coefficients: c of its point θ + Vc [r].
        numbers: value and Vᵀ∇f [1 + K + m].
    """

    coefficients: Vector
    numbers: Arriving

    def read(self) -> tuple[float, Vector]:
        """Value and Vᵀ∇f [K + m]; waits for them. The next launch overwrites them."""
        numbers = self.numbers.tensor().numpy()
        return float(numbers[0]), numbers[1:]


class RecordedObjective:
    """f_C in coefficients of the rows of a basis, around θ; the evaluation at θ is launched.

    Evaluating may write the point into the module's parameters, and leaves it there. What is
    launched and never asked for does so, too, before all that is launched later.

    Args:
        objective: f.
        evaluation: its recording, loaded with C and θ.
        noise: the recording of what noise is told from; None where that is not possible.
        step: the recording of a step, likewise.
        samples: |C|.
        normaliser: what the sum of their losses is divided by.

    Attributes:
        samples: |C|.
    """

    def __init__(
        self,
        objective: Objective,
        evaluation: Recording,
        noise: Recording | None,
        step: Recording | None,
        *,
        samples: int,
        normaliser: OnTheWay,
    ) -> None:
        self.samples, self._arriving = samples, normaliser
        self._evaluation, self._noise, self._step = evaluation, noise, step
        self._device = objective.parameters.device
        self._under_way: list[_UnderWay] = []
        self._at_theta = self._launch(np.zeros(0))
        # What can be made ready for later, while the GPU is busy.
        if noise is not None:
            _write(noise_steps(objective.findings.epsilon), noise.result[0].numpy()[-NOISE_POINTS:])
        self._pieces = [] if step is None else objective.parameters.empty_pieces()

    @cached_property
    def normaliser(self) -> float:
        """What the sum of the losses is divided by, which is waited for."""
        return float(self._arriving.read())

    def __call__(self, coefficients: Vector) -> tuple[float, Vector]:
        """Value and Vᵀ∇f [K + m] at θ + Vc, given c [r] of the first r rows.

        Overwritten by the next evaluation. One that is under way at exactly c is waited for.
        """
        for ahead in self._under_way:
            if np.array_equal(ahead.coefficients, coefficients):
                self._under_way.remove(ahead)
                return ahead.read()
        return self._launch(coefficients).read()

    def at_theta(self) -> tuple[float, Vector]:
        """The same at θ; of all rows as they were made, before any were left out."""
        return self._at_theta.read()

    def launch_ahead(self, coefficients: Vector) -> None:
        """Launch the evaluation at θ + Vc, which will probably be asked for next.

        Args:
            coefficients: c [r] of the first r rows; not written to from now on.
        """
        self._under_way.append(self._launch(coefficients))

    def launch_noise(self, along: Vector) -> Arriving | None:
        """`error_sums` of the losses at `noise_steps` along Vc; None where not recorded.

        Args:
            along: c [r] of the first r rows.
        """
        if self._noise is None:
            return None
        _write(along, self._noise.result[0].numpy()[:-NOISE_POINTS])
        _, sums = self._noise()
        return Arriving(sums, self._device)

    def take(self, coefficients: Vector) -> Taken | None:
        """Write θ + Vc into the parameters, c [r] of the first r rows; None where not recorded.

        Once: the pieces are those that were made ready.
        """
        if self._step is None:
            return None
        _write(coefficients, self._step.result[0].numpy())
        _, norm, pieces = self._step()
        norm_arriving = Arriving(norm, self._device)
        torch._foreach_copy_(self._pieces, pieces)
        return Taken(self._pieces, norm_arriving)

    def _launch(self, coefficients: Vector) -> _UnderWay:
        # They have one place on the host. What was launched there and not asked for may yet fetch
        # other coefficients than its own, and brings numbers that are not read any more.
        self._under_way.clear()
        place, numbers = self._evaluation.result
        _write(coefficients, place.numpy())
        self._evaluation()
        return _UnderWay(coefficients, Arriving(numbers, self._device))


@np.errstate(over="ignore", invalid="ignore")  # what is not finite is found by the search
def _write(numbers: Vector | list[float], place: Vector) -> None:
    """Numbers, and zeros behind them, to where a recording fetches them."""
    place[: len(numbers)] = numbers
    place[len(numbers) :] = 0


def _on_host(coming: int, going: int, dtype: torch.dtype) -> Callable[[], tuple[Tensor, Tensor]]:
    """Where so many numbers are fetched from, and results brought to.

    Made when they are first asked for, before the recording, and held by it.
    """
    return cache(
        lambda: (
            torch.zeros(coming, dtype=dtype, pin_memory=True),
            torch.zeros(going, dtype=torch.float64, pin_memory=True),
        )
    )


def _evaluation(slots: Tensor) -> Part:
    """An evaluation, for a recording; it gives where it has its numbers on the host."""
    on_host = _on_host(len(slots), 1 + len(slots), slots.dtype)

    def evaluate(
        network: Aliased, batch: Batch, theta: Tensor, normaliser: Tensor
    ) -> tuple[Tensor, Tensor]:
        # Copies are part of the recording: each would be a launch of its own.
        coefficients, numbers = on_host()
        parameters = network.parameters
        point = torch.addmv(theta, slots.t(), fetched(coefficients, slots.device))
        here = network if under_way() is None else network.at(point)
        if here is network:  # torch's kernels want parameters that begin evenly
            parameters.assign(point)
        jobs: list[Callable[[], Any]] = [
            partial(losses_and_gradients, here, batch),
            here.parameters.decay_term,
            lambda: normaliser.reciprocal().to(theta.dtype),
        ]
        (losses, gradients), decay, scale = side_by_side(jobs)
        # In one dtype, and of whole vectors: other kernels take two to five times as long.
        gradient = parameters.scale_and_add_decay(parameters.flatten(gradients), scale, point)
        mean = partial(_mean, losses, normaliser, decay)
        value, projected = side_by_side([mean, partial(torch.mv, slots, gradient)])
        brought(torch.cat([value.unsqueeze(0), projected.double()]), numbers)
        return coefficients, numbers

    return evaluate


def _mean(losses: Tensor, normaliser: Tensor, decay: Tensor) -> Tensor:
    return losses.sum(dtype=torch.float64) / normaliser + decay


def _error_sums(objective: Objective, slots: Tensor) -> Part:
    """Forward passes at points along a line, for a recording, and what noise is told from."""
    on_host = _on_host(len(slots) + NOISE_POINTS, 1 + NOISE_POINTS - ORDER, slots.dtype)

    def error_sums_at_points(
        network: Aliased, batch: Batch, theta: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor]:
        numbers, sums = on_host()
        along, lengths = fetched(numbers, slots.device).split([len(slots), NOISE_POINTS])
        direction = slots.t() @ along

        def losses_at(length: Tensor) -> Tensor:
            point = torch.addcmul(theta, direction, length)
            if under_way() is None:
                return network.losses_at(point, batch).detach().double()
            return network.at(point).sample_losses(batch, eager=True).detach().double()

        jobs = [partial(losses_at, length) for length in lengths]
        apart = _may_be_side_by_side(objective, batch)
        with objective.value_mode():
            losses = side_by_side(jobs) if apart else [job() for job in jobs]
        brought(error_sums(torch.stack(losses)), sums)
        return numbers, sums

    return error_sums_at_points


def _step(slots: Tensor) -> Part:
    """A step, for a recording: θ + Vc into the parameters, and Vc in pieces like them."""
    on_host = _on_host(len(slots), 1, slots.dtype)

    def take(
        network: Aliased, _batch: Batch, theta: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        coefficients, norm = on_host()
        step = slots.t() @ fetched(coefficients, slots.device)
        network.parameters.assign(theta + step)
        brought(step.norm().double().reshape(1), norm)
        return coefficients, norm[0], network.parameters.pieces(step)

    return take


def _may_be_side_by_side(objective: Objective, batch: Batch) -> bool:
    """Whether the forward passes for the noise fit side by side, and write to nothing shared.

    What one writes to a tensor that is no buffer, and reads again, is not seen. Then the noise
    may be wrong, and nothing else.
    """
    modules = (objective.network.eager, objective.network.loss.module)
    shared = any(True for m in modules if isinstance(m, nn.Module) for _ in m.buffers())
    graphs = objective.findings.forward_differentiates
    return not (shared or graphs) and objective.may_record(batch, times=NOISE_POINTS)
