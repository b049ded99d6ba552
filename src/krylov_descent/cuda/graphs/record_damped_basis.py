"""The basis of a damped step: J is recorded, and the dense algebra is a few large kernels."""

from typing import Any

from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.curvature.damped_basis import DampedBasis
from krylov_descent.curvature.krylov_basis import Basis
from krylov_descent.curvature.residual_rows import residual_rows
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched

ROWS = "rows of the residuals"


def launch_damped_basis(engine: Recorder, work: DampedBasis) -> Launched[Basis]:
    """The basis, made when it is asked for, in the memory that recorded searches read."""
    return Launched(lambda: _made(engine, work))


def _made(engine: Recorder, work: DampedBasis) -> Basis:
    recorded = None
    if engine.are_fresh(work.batch):
        recorded = engine.graphs.load(ROWS, _rows, work.batch)
    if recorded is None:
        return work.run()
    room = engine.graphs.room(work.provided_for, work.provided_for, work.gradient)
    room.slots.zero_()  # rows that are not made are multiplied by 0, and 0·NaN is NaN
    basis = work.build(recorded(), room.slots)
    room.fill(basis.subspace.rank)
    engine.basis_room = room
    return basis


def _rows(network: Network, batch: Batch) -> Any:
    return residual_rows(network, batch)
