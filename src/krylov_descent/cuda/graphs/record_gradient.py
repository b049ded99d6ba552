"""Recordings of gradients: over all samples in one batch, and of mini-batches.

In one process the recording includes the division of sums by the normaliser. With several ranks it
ends with the sums, which are all-reduced first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.capture import Part, is_foreign
from krylov_descent.cuda.graphs.host_transfer import placed, to_host
from krylov_descent.cuda.graphs.parallel_branches import begin, join, side_by_side
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.cuda.graphs.staleness import PULSE_SAMPLES
from krylov_descent.cuda.triton.entry import under_way
from krylov_descent.curvature.preconditioners.preconditioner import FisherDiagonal
from krylov_descent.objective.batches import Batch, as_samples, tensors_in
from krylov_descent.objective.evaluation import Evaluation, check_normaliser
from krylov_descent.objective.layers.layer_gradients import losses_and_gradients
from krylov_descent.objective.mini_batch import MiniBatch, MiniBatchGradient, mini_batch_gradient
from krylov_descent.objective.network import Network
from krylov_descent.objective.objective import MadeOfSquares, MeanGradient, MeanSquares
from krylov_descent.runtime.engine import Launched


class Means(NamedTuple):
    """The result of `recorded_means`.

    Attributes:
        numbers: value and norm of the gradient [2].
        vectors: gradient [n] and, unless `into` took them, squares [n].
        losses: of the first samples; None if they are unfit for the staleness check.
        held: tensors computed from the squares; the recording keeps them allocated.
    """

    numbers: Tensor
    vectors: list[Tensor]
    losses: Tensor | None
    held: tuple[Tensor, ...]


def launch_gradient(engine: Recorder, work: MeanGradient | MeanSquares) -> Launched[Evaluation]:
    """Value, gradient and squares, if asked for; by one launch if all samples fit one batch."""
    objective, squared = work.objective, isinstance(work, MeanSquares)
    replayed = _replayed_sums if objective.ranks.together else _replayed_means
    found: Evaluation | None = None
    with objective.ranks.own_work():
        batch = _whole_batch(engine, work.data)
        if batch is not None and _may_be_recorded(engine, work):
            found = replayed(engine, work, batch)
    if found is not None:
        return Launched.done(found)

    def walk() -> Evaluation:
        evaluation = work.run()
        if squared:
            engine.settled_at = engine.staleness.times_stale
        return evaluation

    return Launched.done(walk())


def launch_mini_batch(engine: Recorder, work: MiniBatch) -> Launched[MiniBatchGradient]:
    """The gradient of a mini-batch by one launch, without a staleness check."""
    recording = None
    if work.usual and engine.fits(work.batch):
        recording = engine.graphs.load("mini-batch", mini_batch_gradient, work.batch)
    if recording is None:
        return Launched(work.run)
    found: MiniBatchGradient = recording()
    kept = found._replace(loss_sum=found.loss_sum.clone(), normaliser=found.normaliser.clone())
    return Launched.done(kept)


def _whole_batch(engine: Recorder, data: Any) -> Batch | None:
    """All samples as one batch, on their device; None if it does not fit a recording."""
    objective = engine.objective
    batch = objective.single_batch(as_samples(data, may_be_empty=objective.ranks.together))
    return batch if batch is not None and engine.fits(batch) else None


def _may_be_recorded(engine: Recorder, work: MeanGradient | MeanSquares) -> bool:
    """Whether the gradient may be recorded.

    Squares must have been computed eagerly since recordings were last stale: only an eager walk
    probes the model. The plain gradient of a compiled model is left to torch.compile.
    """
    objective = work.objective
    if isinstance(work, MeanGradient):
        return objective.network.model is objective.network.eager
    return objective.squared_gradients.settled and engine.settled_at == engine.staleness.times_stale


def _replayed_means(
    engine: Recorder, work: MeanGradient | MeanSquares, batch: Batch
) -> Evaluation | None:
    """The means over a batch by one launch; None if they cannot be recorded or are stale."""
    objective = work.objective
    parameters = objective.parameters
    into = work.into if isinstance(work, MeanSquares) else None
    given = tensors_in((batch.inputs, batch.targets))
    stays = all(tensor.device == parameters.device for tensor in given)
    batch = batch.to(parameters.device)
    known = objective.network.loss.normaliser(batch.targets, batch.size)
    if isinstance(known, float) and not known:
        return None  # the eager walk raises the error
    recording = engine.graphs.load(
        _name(work),
        partial(recorded_means, _part(engine, work), into),
        batch,
        placed(known, parameters.device),
        fixed=() if into is None else into.tensors,
        numbers=(into.epsilon, into.exponent) if isinstance(into, FisherDiagonal) else (),
        foreign=into is not None and is_foreign(into),
        when_repeated=isinstance(work, MeanGradient),
        where_it_is=stays,
    )
    if recording is None:
        return None
    on_host = to_host(known) if isinstance(known, Tensor) else None  # ahead of the long replay
    means: Means = recording()
    numbers = to_host(means.numbers)
    if not engine.are_fresh(batch, means.losses):
        return None
    normaliser = float(known if on_host is None else on_host.result())
    check_normaliser(normaliser)
    # The next replay overwrites the vectors; a repeatable step does not read them after that.
    vectors = means.vectors if engine.repeatable else [v.clone() for v in means.vectors]
    gradient, *squares = vectors
    return Evaluation(
        Launched(partial(_pair, numbers)),
        gradient,
        squares[0] if squares else gradient.new_empty(0),
        batch.size,
        normaliser,
    )


def _pair(numbers: Launched[Tensor]) -> tuple[float, float]:
    value, norm = numbers.result().tolist()
    return value, norm


def _replayed_sums(
    engine: Recorder, work: MeanGradient | MeanSquares, batch: Batch
) -> Evaluation | None:
    """The sums over this rank's batch by one launch, all-reduced to means; None as above."""
    objective = work.objective
    batch = batch.to(objective.parameters.device)
    repeated = isinstance(work, MeanGradient)
    recording = engine.graphs.load(_name(work), _part(engine, work), batch, when_repeated=repeated)
    if recording is None:
        return None
    losses, *vectors = recording()
    if not engine.are_fresh(batch):
        return None
    sums = objective.sums()
    sums.add(batch, losses)
    gradient, *squares = (vector.clone() for vector in vectors)
    if not isinstance(work, MeanSquares):
        return sums.evaluation(gradient, None)
    return work.made_of(sums.evaluation(gradient, squares[0], squared=True))


def _name(work: MeanGradient | MeanSquares) -> str:
    return "gradient" if isinstance(work, MeanGradient) else "gradient and squares"


def _part(engine: Recorder, work: MeanGradient | MeanSquares) -> Part:
    """The function to record: losses, Σ gradients [n] and, for squares, Σ squares [n]."""
    if isinstance(work, MeanGradient):
        return _gradient
    objective = engine.objective

    def squared(network: Network, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        of_batch = objective.squared_gradients.on(network).of_batch
        losses, gradients, squares = of_batch(batch, objective.activation_memory)
        flatten = network.parameters.flatten
        return losses, flatten(gradients), flatten(squares)

    return squared


def _gradient(network: Network, batch: Batch) -> tuple[Tensor, Tensor]:
    losses, gradients = losses_and_gradients(network, batch)
    return losses, network.parameters.flatten(gradients)


def recorded_means(
    part: Part, into: MadeOfSquares | None, network: Network, batch: Batch, normaliser: Tensor
) -> Means:
    """The means over a batch; the function that is recorded.

    Args:
        part: returns the losses, Σ gradients [n] and optionally Σ squares [n].
        into: takes the squares, which are then left out of the result.
        network: its parameters have the L2 term.
        batch: all samples.
        normaliser: divisor of the sum of losses, in float64.
    """
    parameters = network.parameters
    beside: list[Callable[[], Any]] = [
        parameters.decay_term,
        parameters.copy,
        # Sample i contributes nᵢN/W to the mean over N samples, so its square is nᵢ²N²/W², over N.
        lambda: [s.to(parameters.dtype) for s in (1 / normaliser, batch.size / normaliser**2)],
    ]
    decay, theta, (scale, scale_of_squares) = begin(beside)
    losses, gradient, *of_squares = part(network, batch)
    join()

    def numbers() -> Tensor:
        parameters.scale_and_add_decay(gradient, scale, theta)
        value = losses.sum(dtype=torch.float64) / normaliser + decay
        return torch.stack([value, gradient.norm().double()])

    def scaled(sums: Tensor) -> Tensor:
        sums.mul_(scale_of_squares)
        if into is not None:
            into.take_squares(parameters, sums)
        return sums

    following: list[Callable[[], Tensor]] = [
        numbers,
        *(partial(scaled, sums) for sums in of_squares),
    ]
    found, *squares = side_by_side(following)
    # Otherwise the few samples get their own recording, with the bits of the eager model: rounding
    # in a larger batch might look stale close to a minimum, and in low precision anywhere.
    alone = under_way() is not None and network.is_plain and network.autocast is None
    first = losses[:PULSE_SAMPLES] if alone else None
    if into is None:
        return Means(found, [gradient, *squares], first, ())
    return Means(found, [gradient], first, into.tensors)
