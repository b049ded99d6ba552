"""The Krylov basis of a step by recordings, at the same address in every step.

Each direction is one launch: a product with H, one with D⁻¹ and the orthogonalisation. The GPU
counts the rows, so all directions are launches of the same recording.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.growing_basis import GrowingBasis
from krylov_descent.algorithms.krylov import Directions, KrylovSpace, fill_with_krylov_space
from krylov_descent.algorithms.subspace import cut, store_previous
from krylov_descent.cuda.graphs.capture import Capture, Recorded, is_foreign, is_large
from krylov_descent.cuda.graphs.counted_basis import CountedBasis
from krylov_descent.cuda.graphs.host_transfer import to_host
from krylov_descent.cuda.graphs.parallel_branches import side_by_side
from krylov_descent.cuda.graphs.record_product import RecordedLinearization
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.cuda.triton.entry import basis_operations, under_way
from krylov_descent.curvature.kept_jacobian import NoJacobianError
from krylov_descent.curvature.krylov_basis import Basis, KrylovBasis
from krylov_descent.curvature.preconditioners.preconditioner import InPlace
from krylov_descent.curvature.products import Curvature, CurvatureProduct
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched
from krylov_descent.runtime.ops import Operations, use


def launch_basis(engine: Recorder, work: KrylovBasis) -> Launched[Basis]:
    """The basis; launched at once if it is recorded already and the step is repeatable."""
    if work.objective.ranks.together or not work.layout.is_plain:
        return Launched(work.run)
    if engine.repeatable and engine.graphs.has(_name(work)):
        return _launched(engine, work)
    return Launched(lambda: _launched(engine, work).result())


def _launched(engine: Recorder, work: KrylovBasis) -> Launched[Basis]:
    product, learnt = work.prepare()
    batch = product.single_batch
    if batch is None:
        return Launched(lambda: work.build(product, learnt))
    krylov, previous = min(work.dimension, work.gradient.numel()), len(work.previous_steps)
    provided = min(work.provided_for, work.gradient.numel())
    room = engine.graphs.room(
        krylov + work.most_previous, provided + work.most_previous, work.gradient
    )
    slots = room.slots
    stored, placement = StoredBasis.at(slots), Alone(work.gradient.numel())
    space: Directions | None = _recorded(engine, work, product, batch, slots)
    if space is None:
        metric, basis = work.preconditioner, GrowingBasis(stored)
        space = KrylovSpace(basis, product, metric, work.gradient, placement)
    slots.zero_()  # rows that are not made are multiplied by 0, and 0·NaN is NaN
    store_previous(stored, krylov, work.previous_steps, placement)
    kernels = basis_operations(slots.device) if is_large(work.objective.network) else Operations()
    with torch.cuda.device_of(slots), use(kernels):
        found = fill_with_krylov_space(space, krylov, previous)
    room.fill(krylov + previous)
    engine.basis_room, on_host = room, to_host(found)

    def there() -> Basis:
        subspace = cut(stored, placement, on_host.result())
        return Basis(subspace, product.samples, product.kept, product.by_jacobian, learnt)

    return Launched(there)


def _recorded(
    engine: Recorder, work: KrylovBasis, product: CurvatureProduct, batch: Batch, slots: Tensor
) -> "RecordedSpace | None":
    """The directions by recordings; None if they cannot be recorded or are stale."""
    D = work.preconditioner
    if not (isinstance(D, InPlace) and engine.are_fresh(batch)):
        return None

    def make(capture: Capture, network: Network) -> RecordedSpace:
        keeps_jacobian = product.keeps_jacobian
        return RecordedSpace(work.curvature, D, batch, keeps_jacobian, slots, capture, network)

    def made() -> RecordedSpace | None:
        return engine.graphs.made(_name(work), make, batch, fixed=(slots, *D.tensors))

    try:
        recorded = made()
    except NoJacobianError:
        product.give_up_jacobian()
        recorded = None if product.single_batch is None else made()
    if recorded is not None:
        recorded.load(batch, work.gradient, product.scale)
    return recorded


def _name(work: KrylovBasis) -> str:
    return f"basis of {work.curvature.kind}"


class RecordedSpace:
    """A `KrylovSpace` whose every method is one launch.

    Args:
        curvature: H.
        preconditioner: D, whose tensors stay in place.
        batch: samples in the shape of those that `load` will get.
        keeps_jacobian: whether products are by J.
        slots: the rows [K + m, n]; overwritten.
        capture: records a function.
        network: the model, on aliases of its parameters.
    """

    def __init__(
        self,
        curvature: Curvature,
        preconditioner: InPlace,
        batch: Batch,
        keeps_jacobian: bool,
        slots: Tensor,
        capture: Capture,
        network: Network,
    ) -> None:
        self._gradient, self._scale = torch.zeros_like(slots[0]), slots.new_zeros(())

        def split_preconditioner() -> None:
            products = under_way()
            if products is not None:
                side_by_side(products.prepare(preconditioner.tensors))

        self._linearization = RecordedLinearization(
            curvature, batch, keeps_jacobian, capture, network, split_preconditioner
        )
        # Not `self`: a cycle of references would keep the graph's memory after the last use.
        parameters, curved, scale = network.parameters, self._linearization.product, self._scale

        def product(v: Tensor) -> Tensor:
            return parameters.scale_and_add_decay(curved(v), scale, v)

        basis, placement = CountedBasis(slots), Alone(len(self._gradient))
        # The recordings read its tensors, and do not keep them.
        self._space = space = KrylovSpace(basis, product, preconditioner, self._gradient, placement)

        # All at once: autograd refuses the linearisation's graph after the parameters changed.
        parts: list[Callable[[], Any]] = [space.begin, space.measure, space.numbers]
        if len(slots) > 1:
            parts += [space.add_next, space.add_previous]
        self._recorded: dict[str, Recorded[Any]] = {}
        for part in parts:
            space.begin_at(1)  # a warm-up may append a row
            self._recorded[part.__name__] = capture(
                network,
                part,
                rehearsal=part,
                after=self._linearization.recorded,
                foreign=is_foreign(preconditioner),
            )

    def load(self, batch: Batch, gradient: Tensor, scale: float) -> None:
        """Linearise at the current parameters over these samples, for this gradient."""
        self._gradient.copy_(gradient)
        self._scale.fill_(scale)
        self._linearization.load(batch)

    def begin(self) -> bool:
        """See `KrylovSpace`."""
        self._replay("begin")
        return True

    def begin_at(self, row: int) -> None:
        """All rows before this one were made: there are no breakdowns that the host sees."""

    def add_next(self) -> bool:
        """See `KrylovSpace`."""
        self._replay("add_next")
        return True

    def add_previous(self) -> bool:
        """See `KrylovSpace`."""
        self._replay("add_previous")
        return True

    def measure(self) -> None:
        """See `KrylovSpace`."""
        self._replay("measure")

    def numbers(self) -> Tensor:
        """See `KrylovSpace`; overwritten by the next step."""
        found: Tensor = self._replay("numbers")
        return found

    def _replay(self, part: str) -> Any:
        self._recorded[part].graph.replay()
        return self._recorded[part].result
