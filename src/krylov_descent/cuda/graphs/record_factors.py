"""Recordings of the Kronecker factors."""

import functools
from contextlib import suppress

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.host_transfer import placed
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.curvature.preconditioners.kronecker import FactorsOfBatches
from krylov_descent.curvature.preconditioners.layer_moments import sums_of
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched

# Most entries of all factors. A recording also keeps the matrices they are computed from.
LARGEST_FACTORS = 1 << 25


def launch_factors(engine: Recorder, work: FactorsOfBatches) -> Launched[None]:
    """Compute the factors of a single batch by one launch, or eagerly if that is impossible."""
    return Launched.done(None) if _replayed(engine, work) else Launched(work.run)


def _replayed(engine: Recorder, work: FactorsOfBatches) -> bool:
    factors, objective = work.factors, work.objective
    if objective.ranks.together or len(work.batches) != 1 or not engine.fits(work.batches[0]):
        return False
    (batch,) = work.batches
    form, places = factors.form_in_outputs(objective, batch), factors.trusted_places(objective)
    if sum(place.numbers for place in places) > LARGEST_FACTORS:
        return False
    factors.make_room(places, objective.parameters)
    _load_solver(objective.parameters.device)

    def make(network: Network, batch: Batch, normaliser: Tensor, *squares: Tensor) -> None:
        moments, left_out = sums_of(network, batch, places, form)
        without = left_out & {place.name for place in places}
        if without:
            raise RuntimeError(f"the weight of {without.pop()!r} is used outside of its layer")
        sums = moments.split([place.numbers for place in places])
        factors.make(sums, normaliser, network.parameters, *squares)

    like = objective.parameters.tensors[0]
    normaliser = objective.network.loss.normaliser(batch.targets, batch.size)
    recording = engine.graphs.load(
        f"factors, {form}",  # "diagonal" until a batch shows the form
        make,
        batch,
        placed(normaliser, like.device).to(like.dtype),
        *([] if factors.squares is None else [factors.squares]),
        fixed=factors.tensors,
        numbers=(factors.epsilon,),
    )
    if recording is None:
        return False
    recording()
    return engine.are_fresh(batch)


@functools.cache
def _load_solver(device: torch.device) -> None:
    """Load the library of the Cholesky decomposition, which is impossible within a recording."""
    with suppress(RuntimeError):  # raised again when the factors are computed
        torch.linalg.cholesky_ex(torch.eye(2, device=device))
