"""Recordings of the search objective c → f_C(θ + Vc), with a basis V at a fixed address.

An evaluation is one launch: the coefficients go in from the host, the value and the projected
gradient come out. The noise measurement and the final step are one launch each. Every search begins
with c = 0, which does not depend on the basis. So that evaluation is launched right behind the
basis, and the noise measurement behind it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent.algorithms.bfgs import Vector
from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.algorithms.noise import (
    NOISE_POINTS,
    ORDER,
    error_sums,
    noise_from,
    noise_steps,
    settled_noise,
)
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.cuda.graphs.basis_room import BasisRoom
from krylov_descent.cuda.graphs.capture import Recording
from krylov_descent.cuda.graphs.host_transfer import arriving, placed, to_host
from krylov_descent.cuda.graphs.parallel_branches import begin, join, side_by_side
from krylov_descent.cuda.graphs.recorder import EVALUATION, NOISE, STEP, Recorder
from krylov_descent.cuda.graphs.search_mailbox import SearchMailbox, write
from krylov_descent.cuda.triton.entry import under_way
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.layers.layer_gradients import losses_and_reach
from krylov_descent.objective.network import Network
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.objective.search_objective import Search, SearchObjective, Taken
from krylov_descent.runtime.engine import Launched
from krylov_descent.runtime.ops import operations
from krylov_descent.runtime.private import copy_each


def launch_search(engine: Recorder, work: Search) -> Launched[SearchObjective]:
    """The search, with f_C(θ) launched behind the basis if that is in the engine's slots."""
    if engine.basis_room is None:  # the basis is not launched yet
        return Launched(lambda: _launched(engine, work))
    return Launched.done(_launched(engine, work))


def _launched(engine: Recorder, work: Search) -> SearchObjective:
    room, objective = engine.basis_room, work.objective
    batch = None if room is None else objective.single_batch(work.samples)
    if room is None or batch is None:
        return work.run()
    device = objective.parameters.device
    batch = batch.to(device)
    normaliser = placed(objective.network.loss.normaliser(batch.targets, batch.size), device)
    theta = objective.parameters.copy()
    # From here on the parameters are written to, even by the warm-up of a recording.
    engine.open_search = plain = SearchObjective(objective, work.samples, work.previous, theta)

    def mailbox(*_: Any) -> SearchMailbox:
        return SearchMailbox(len(room.slots), room.slots)

    evaluation = engine.graphs.load(
        EVALUATION,
        partial(_evaluate, room),
        batch,
        *(theta, normaliser, work.previous()),
        fixed=room.tensors,
        held=mailbox,
    )
    if evaluation is None:
        plain.restore()
        engine.open_search = None
        return plain
    apart = _may_be_side_by_side(engine, batch)
    errors = partial(_error_sums_at_points, objective, apart)
    noise = engine.graphs.beside(evaluation, NOISE, errors, held=_sums_on_host)
    taking, to_take = partial(_take, room), partial(_numbers_to_take, room.slots)
    step = engine.graphs.beside(evaluation, STEP, taking, fixed=room.tensors, held=to_take)
    found = RecordedSearch(
        engine, work, theta, batch.size, to_host(normaliser), evaluation, noise, step
    )
    engine.open_search = found
    return found


class RecordedSearch(SearchObjective):
    """f_C around θ in coefficients of the basis; the constructor launches the evaluation at θ.

    Launched evaluations write to the parameters and to pinned memory even if nobody reads their
    results. At the end of a step that is not taken the engine waits for them.

    Args:
        engine: the engine that launches.
        work: the requested search.
        theta: θ [n].
        samples: |C|.
        normaliser: divisor of the sum of losses, in transfer to the host.
        evaluation: recording of an evaluation, loaded with C, θ and the previous step.
        noise: recording of the noise measurement; None if it cannot be recorded.
        step: recording of the final step; None if it cannot be recorded.
    """

    def __init__(
        self,
        engine: Recorder,
        work: Search,
        theta: Tensor,
        samples: int,
        normaliser: Launched[Tensor],
        evaluation: Recording,
        noise: Recording | None,
        step: Recording | None,
    ) -> None:
        super().__init__(work.objective, work.samples, work.previous, theta)
        self._engine = engine
        self._counted, self._arriving = samples, normaliser
        self._evaluation, self._step = evaluation, step
        self._device = theta.device
        self._mailbox: SearchMailbox = evaluation.result
        self._at_theta = self._launch(np.zeros(0))
        self._noise = None if noise is None else arriving(noise(), self._device)
        # Allocated here, while the GPU is busy.
        self._pieces = [] if step is None else work.objective.parameters.empty_pieces()
        self._recorded = True

    def over(self, subspace: Subspace, coordinates: Coordinates) -> SearchObjective:
        super().over(subspace, coordinates)
        self._normaliser = float(self._arriving.result())
        self.samples = self._counted
        self._recorded = bool(self._normaliser)  # for 0 the eager walk raises the error
        return self

    def start(self) -> tuple[float, Vector]:
        if not self._recorded:
            return super().start()
        self._coordinates.find()  # while the GPU evaluates
        value, projected = _read(self._at_theta)
        self.samples_seen += self.samples
        # The projected gradient has all rows, including those that `cut` dropped.
        return value, self._coordinates.from_gradient(projected[self._subspace.kept])

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        if not self._recorded:
            return super().__call__(a)
        value, projected = _read(self._launch(self._coordinates.to_basis(a)))
        self.samples_seen += self.samples
        return value, self._coordinates.from_gradient(projected[: self._subspace.rank])

    def take(self, a: Vector) -> Taken:
        if self._step is None or not self._recorded:
            return super().take(a)
        write(self._coordinates.to_basis(a), self._step.result[0].numpy())
        _, norm, pieces = self._step()
        on_host = arriving(norm, self._device)
        copy_each(self._pieces, pieces)
        self._engine.open_search = None
        return Taken(self._pieces, float(on_host.result()))

    def take_step(self, step: Tensor) -> Taken:
        self._engine.open_search = None
        return super().take_step(step)

    def _noise_along_previous(self, epsilon: float, limit: float) -> float:
        if self._noise is None or not self._recorded:
            return super()._noise_along_previous(epsilon, limit)
        recorded = noise_from(self._noise.result()) / self._normaliser
        if not recorded:  # there may be no previous step
            return super()._noise_along_previous(epsilon, limit)
        self.samples_seen += NOISE_POINTS * self.samples

        def along(part: float) -> float:
            return recorded if part == 1 else self._noise_along(self._previous(), part, epsilon)

        return settled_noise(along, limit)

    def _launch(self, coefficients: Vector) -> Launched[Tensor]:
        """Launch an evaluation at θ + Vc; the next evaluation overwrites its numbers.

        An earlier evaluation whose result nobody reads may still be running, and read some of these
        coefficients. This evaluation follows it on the stream and overwrites its numbers.

        Args:
            coefficients: c [r] of the first r rows.
        """
        self._mailbox.send(coefficients)
        self._evaluation()
        return arriving(self._mailbox.numbers, self._device)


def _read(numbers: Launched[Tensor]) -> tuple[float, Vector]:
    """Value and Vᵀ∇f [K + m] of an evaluation; waits for them."""
    found = numbers.result().numpy()
    return float(found[0]), found[1:]


def _evaluate(
    room: BasisRoom,
    network: Aliased,
    batch: Batch,
    theta: Tensor,
    normaliser: Tensor,
    _: Tensor,
    *,
    held: SearchMailbox,
) -> SearchMailbox:
    """Evaluate at the mailbox's coefficients, for a recording; returns the mailbox."""
    # The copies from and to the host are recorded too, which saves their launches.
    parameters = network.parameters
    point = operations().combine(room.slots, held.coefficients(), theta, room.filled)
    here = network if under_way() is None else network.at(point)
    if here is network:  # torch's kernels need aligned parameters
        parameters.assign(point)
    losses, reach = losses_and_reach(here, batch)
    jobs: list[Callable[[], Tensor]] = [
        partial(_mean, losses.detach(), normaliser, here.parameters),
        lambda: normaliser.reciprocal().to(theta.dtype),
    ]
    value, scale = begin(jobs)  # beside the backward pass
    gradients = reach.gradients(losses)
    join()
    # Whole vectors in one dtype: other kernels take two to five times as long.
    gradient = parameters.scale_and_add_decay(parameters.flatten(gradients), scale, point)
    held.bring(value, operations().project(room.slots, gradient, room.filled))
    return held


def _mean(losses: Tensor, normaliser: Tensor, parameters: FlatParameters) -> Tensor:
    return losses.sum(dtype=torch.float64) / normaliser + parameters.decay_term()


def _error_sums_at_points(
    objective: Objective,
    apart: bool,
    network: Aliased,
    batch: Batch,
    theta: Tensor,
    _: Tensor,
    previous: Tensor,
    *,
    held: Tensor,
) -> Tensor:
    """Forward passes along the previous step, for a recording; returns the error sums."""

    def losses_at(part: float) -> Tensor:
        point = torch.add(theta, previous, alpha=part)
        if under_way() is None:
            return network.losses_at(point, batch).detach().double()
        return network.at(point).sample_losses(batch, eager=True).detach().double()

    jobs = [partial(losses_at, part) for part in noise_steps(objective.findings.epsilon)]
    with objective.value_mode():
        losses = side_by_side(jobs) if apart else [job() for job in jobs]
    held.copy_(error_sums(torch.stack(losses)), non_blocking=True)
    return held


def _sums_on_host(network: Aliased, *_: Any) -> Tensor:
    return _on_host(1 + NOISE_POINTS - ORDER, torch.float64, network)


def _take(
    room: BasisRoom,
    network: Aliased,
    _batch: Batch,
    theta: Tensor,
    *_: Tensor,
    held: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Write θ + Vc to the parameters, for a recording; returns c, ‖Vc‖ and the pieces of Vc."""
    coefficients, norm = held
    here = coefficients.to(theta.device, non_blocking=True)
    step = operations().combine(room.slots, here, span=room.filled)
    network.parameters.assign(theta + step)
    norm.copy_(step.norm().double().reshape(1), non_blocking=True)
    return coefficients, norm[0], network.parameters.pieces(step)


def _numbers_to_take(slots: Tensor, network: Aliased, *_: Any) -> tuple[Tensor, Tensor]:
    """Host memory for c and for the norm of the step."""
    return _on_host(len(slots), slots.dtype, network), _on_host(1, torch.float64, network)


def _on_host(count: int, dtype: torch.dtype, network: Network) -> Tensor:
    """Host memory [count] for transfers, pinned if the parameters are on a GPU."""
    pinned = network.parameters.device.type == "cuda"
    return torch.zeros(count, dtype=dtype, pin_memory=pinned)


def _may_be_side_by_side(engine: Recorder, batch: Batch) -> bool:
    """Whether the forward passes for the noise fit in memory together and share no buffers.

    Writes to tensors that are not buffers go undetected. Then only the noise may be wrong.
    """
    objective = engine.objective
    modules = (objective.network.eager, objective.network.loss.module)
    shared = any(True for m in modules if isinstance(m, nn.Module) for _ in m.buffers())
    graphs = objective.findings.forward_differentiates
    return not (shared or graphs) and engine.fits(batch, times=NOISE_POINTS)
