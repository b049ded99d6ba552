"""f_C over a basis that is in the same place at every step, by recordings: c → f_C(θ + Vc).

What a search on a GPU asks for, with little for the host to do: an evaluation is one launch, which
fetches the coefficients from the host and brings value and projected gradient there, and so are the
measurement of noise and the step that is taken in the end. They are made ready while the GPU is
busy with the basis, and the evaluation with which every search begins, c = 0, is launched right
behind that, and the noise behind it: both are the same whatever the basis turns out to be. Another
point that will probably be asked for can be launched ahead, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent.algorithms.bfgs import Vector
from krylov_descent.algorithms.noise import NOISE_POINTS, ORDER, error_sums, noise_steps
from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.cuda.graphs.capture import Recording
from krylov_descent.cuda.graphs.host_transfer import Arriving, OnTheWay, placed
from krylov_descent.cuda.graphs.parallel_branches import begin, join, side_by_side
from krylov_descent.cuda.graphs.search_mailbox import SearchMailbox, write
from krylov_descent.cuda.graphs.side_stream import beside_what_follows
from krylov_descent.cuda.triton.entry import under_way
from krylov_descent.objective.batches import Batch, Samples
from krylov_descent.objective.layers.layer_gradients import losses_and_reach
from krylov_descent.objective.network import Network
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.parameters import FlatParameters

# Names of recordings.
EVALUATION, NOISE, STEP = "evaluation", "noise", "step"


def launched_objective(
    objective: Objective,
    samples: Samples,
    theta: Tensor,
    slots: Tensor,
    previous: Callable[[], Tensor],
    since: torch.cuda.Event | None = None,
) -> "RecordedObjective | None":
    """f_C, whose evaluation at θ is under way; None where it cannot be recorded.

    Args:
        objective: f.
        samples: the set C.
        theta: θ [n].
        slots: V as rows [K + m, n], which the GPU may be busy with still.
        previous: the last step [n], zeros where there is none.
        since: a moment of this step after which nothing was written to C, θ and the parameters:
            they are copied without waiting for what followed. None for now.
    """
    batch, recordings = objective.single_batch(samples), objective.recordings
    if batch is None:
        return None
    with beside_what_follows(since, theta.device):
        found = objective.network.loss.normaliser(batch.targets, batch.size)
        normaliser = placed(found, theta.device)
        arriving, step_before = OnTheWay(normaliser), previous()
    given = (theta, normaliser, step_before)

    def mailbox(*_: Any) -> SearchMailbox:
        return SearchMailbox(len(slots), slots)

    evaluation = recordings.load(
        EVALUATION,
        partial(_evaluate, slots),
        batch,
        *given,
        fixed=(slots,),
        held=mailbox,
        since=since,
    )
    if evaluation is None:
        return None
    errors = partial(_error_sums_at_points, objective)
    noise = recordings.beside(evaluation, NOISE, errors, held=_sums_on_host)
    taking, to_take = partial(_take, slots), partial(_numbers_to_take, slots)
    step = recordings.beside(evaluation, STEP, taking, fixed=(slots,), held=to_take)
    return RecordedObjective(
        objective, evaluation, noise, step, samples=batch.size, normaliser=arriving
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
class _Evaluation:
    """An evaluation that was launched.

    Attributes:
        coefficients: c of its point θ + Vc [r].
        numbers: value and Vᵀ∇f [1 + K + m]; overwritten by the next evaluation.
    """

    coefficients: Vector
    numbers: Arriving

    def read(self) -> tuple[float, Vector]:
        """Value and Vᵀ∇f [K + m]; waits for them."""
        numbers = self.numbers.tensor().numpy()
        return float(numbers[0]), numbers[1:]


class RecordedObjective:
    """f_C in coefficients of the rows of a basis, around θ; the evaluation at θ is launched.

    Evaluating may write the point into the module's parameters, and leaves it there. What is
    launched and never asked for does so, too, before all that is launched later. It also writes to
    pinned memory of the recordings: read the last evaluation, or call `Recordings.finish`, before
    they can be let go.

    Args:
        objective: f.
        evaluation: its recording, loaded with C, θ and the previous step.
        noise: the recording of what noise is told from; None where that is not possible.
        step: the recording of a step, likewise.
        samples: |C|.
        normaliser: what the sum of their losses is divided by.

    Attributes:
        samples: |C|.
        noise: `error_sums` of the losses at `noise_steps` along the previous step; None where not
            recorded.
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
        self._evaluation, self._step = evaluation, step
        self._device = objective.parameters.device
        self._mailbox: SearchMailbox = evaluation.result
        self._at_theta = self._newest = self._launch(np.zeros(0))
        self.noise = None if noise is None else Arriving(noise(), self._device)
        # Made ready for later, while the GPU is busy.
        self._pieces = [] if step is None else objective.parameters.empty_pieces()

    @cached_property
    def normaliser(self) -> float:
        """What the sum of the losses is divided by, which is waited for."""
        return float(self._arriving.read())

    def __call__(self, coefficients: Vector) -> tuple[float, Vector]:
        """Value and Vᵀ∇f [K + m] at θ + Vc; overwritten by the next evaluation.

        If c is that of the newest evaluation, nothing is launched, and that one is waited for.

        Args:
            coefficients: c [r] of the first r rows; not written to from now on.
        """
        if not np.array_equal(self._newest.coefficients, coefficients):
            self.launch_ahead(coefficients)
        return self._newest.read()

    def at_theta(self) -> tuple[float, Vector]:
        """The same at θ; of all rows as they were made, before any were left out.

        Ask before anything else is launched: there is one place for the numbers.
        """
        assert self._newest is self._at_theta, "the numbers at θ may be overwritten"
        return self._at_theta.read()

    def launch_ahead(self, coefficients: Vector) -> None:
        """Launch the evaluation at θ + Vc, which will probably be asked for next.

        Args:
            coefficients: c [r] of the first r rows; not written to from now on.
        """
        self._newest = self._launch(coefficients)

    def take(self, coefficients: Vector) -> Taken | None:
        """Write θ + Vc into the parameters, c [r] of the first r rows; None where not recorded.

        Once: the pieces are those that were made ready.
        """
        if self._step is None:
            return None
        write(coefficients, self._step.result[0].numpy())
        _, norm, pieces = self._step()
        norm_arriving = Arriving(norm, self._device)
        torch._foreach_copy_(self._pieces, pieces)
        return Taken(self._pieces, norm_arriving)

    def _launch(self, coefficients: Vector) -> _Evaluation:
        # One that nobody asked for may still be under way, and read some of these coefficients.
        # Its numbers are overwritten by this one's, which follows it on the stream.
        self._mailbox.send(coefficients)
        self._evaluation()
        return _Evaluation(coefficients, Arriving(self._mailbox.numbers, self._device))


def _evaluate(
    slots: Tensor,
    network: Aliased,
    batch: Batch,
    theta: Tensor,
    normaliser: Tensor,
    _: Tensor,
    *,
    held: SearchMailbox,
) -> SearchMailbox:
    """An evaluation, for a recording; gives its mailbox."""
    # Copies are part of the recording: each would be a launch of its own.
    parameters = network.parameters
    point = torch.addmv(theta, slots.t(), held.coefficients())
    here = network if under_way() is None else network.at(point)
    if here is network:  # torch's kernels want parameters that begin evenly
        parameters.assign(point)
    losses, reach = losses_and_reach(here, batch)
    jobs: list[Callable[[], Tensor]] = [
        partial(_mean, losses.detach(), normaliser, here.parameters),
        lambda: normaliser.reciprocal().to(theta.dtype),
    ]
    value, scale = begin(jobs)  # beside the backward pass
    gradients = reach.gradients(losses)
    join()
    # In one dtype, and of whole vectors: other kernels take two to five times as long.
    gradient = parameters.scale_and_add_decay(parameters.flatten(gradients), scale, point)
    held.bring(value, torch.mv(slots, gradient))
    return held


def _mean(losses: Tensor, normaliser: Tensor, parameters: FlatParameters) -> Tensor:
    return losses.sum(dtype=torch.float64) / normaliser + parameters.decay_term()


def _error_sums_at_points(
    objective: Objective,
    network: Aliased,
    batch: Batch,
    theta: Tensor,
    _: Tensor,
    previous: Tensor,
    *,
    held: Tensor,
) -> Tensor:
    """Forward passes along the previous step, for a recording; gives what noise is told from."""

    def losses_at(part: float) -> Tensor:
        point = torch.add(theta, previous, alpha=part)
        if under_way() is None:
            return network.losses_at(point, batch).detach().double()
        return network.at(point).sample_losses(batch, eager=True).detach().double()

    jobs = [partial(losses_at, part) for part in noise_steps(objective.findings.epsilon)]
    apart = _may_be_side_by_side(objective, batch)
    with objective.value_mode():
        losses = side_by_side(jobs) if apart else [job() for job in jobs]
    held.copy_(error_sums(torch.stack(losses)), non_blocking=True)
    return held


def _sums_on_host(network: Aliased, *_: Any) -> Tensor:
    return _on_host(1 + NOISE_POINTS - ORDER, torch.float64, network)


def _take(
    slots: Tensor,
    network: Aliased,
    _batch: Batch,
    theta: Tensor,
    *_: Tensor,
    held: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A step, for a recording: θ + Vc into the parameters, and Vc in pieces like them."""
    coefficients, norm = held
    step = slots.t() @ coefficients.to(slots.device, non_blocking=True)
    network.parameters.assign(theta + step)
    norm.copy_(step.norm().double().reshape(1), non_blocking=True)
    return coefficients, norm[0], network.parameters.pieces(step)


def _numbers_to_take(slots: Tensor, network: Aliased, *_: Any) -> tuple[Tensor, Tensor]:
    """Where c is copied from, and the norm to."""
    return _on_host(len(slots), slots.dtype, network), _on_host(1, torch.float64, network)


def _on_host(count: int, dtype: torch.dtype, network: Network) -> Tensor:
    """Where so many numbers are copied from or to: in pinned memory, where there is a GPU."""
    pinned = network.parameters.device.type == "cuda"
    return torch.zeros(count, dtype=dtype, pin_memory=pinned)


def _may_be_side_by_side(objective: Objective, batch: Batch) -> bool:
    """Whether the forward passes for the noise fit side by side, and write to nothing shared.

    What one writes to a tensor that is no buffer, and reads again, is not seen. Then the noise
    may be wrong, and nothing else.
    """
    modules = (objective.network.eager, objective.network.loss.module)
    shared = any(True for m in modules if isinstance(m, nn.Module) for _ in m.buffers())
    graphs = objective.findings.forward_differentiates
    return not (shared or graphs) and objective.may_record(batch, times=NOISE_POINTS)
