"""The Krylov basis of a step by recordings, at the same address in every step.

Each direction is one launch: a product with H, one with D⁻¹ and the orthogonalisation. Recording
takes as long as one eager basis, some tenths of a second for a deep net, so it is done only if D
stays in place over steps.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.krylov import Directions, KrylovSpace, fill_with_krylov_space
from krylov_descent.algorithms.subspace import cut, store_previous
from krylov_descent.cuda.graphs.capture import Capture, Recorded, is_foreign, is_large
from krylov_descent.cuda.graphs.host_transfer import to_host
from krylov_descent.cuda.graphs.parallel_branches import side_by_side
from krylov_descent.cuda.graphs.record_product import RecordedLinearization
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.cuda.triton.entry import basis_operations, under_way
from krylov_descent.curvature.krylov_basis import Basis, KrylovBasis
from krylov_descent.curvature.preconditioners.preconditioner import InPlace
from krylov_descent.curvature.products import Curvature, CurvatureProduct
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched
from krylov_descent.runtime.ops import Operations, use

# Directions that are run as warm-up before they are recorded.
REHEARSED = 3


def launch_basis(engine: Recorder, work: KrylovBasis) -> Launched[Basis]:
    """The basis; launched at once if it is recorded already and the step is repeatable."""
    at_hand = work.layout.kind == "replicated" and work.layout.storage.is_plain
    if work.objective.ranks.together or not at_hand or not work.usual:
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
    slots = engine.graphs.room(krylov + work.most_previous, work.gradient)
    slots[krylov + previous :].zero_()  # evaluations multiply them by 0, and 0·NaN is NaN
    if not slots.is_cuda:
        slots.zero_()  # on a CPU rows after a breakdown are not written
    stored, placement = StoredBasis.at(slots), Alone(work.gradient.numel())
    space: Directions | None = _recorded(engine, work, product, batch, slots)
    if space is None:
        space = KrylovSpace(stored, product, work.preconditioner, work.gradient, placement)
    store_previous(stored, krylov, work.previous_steps, placement)
    kernels = basis_operations(slots.device) if is_large(work.objective.network) else Operations()
    with torch.cuda.device_of(slots), use(kernels):
        found = fill_with_krylov_space(space, krylov, previous)
    engine.basis_slots, on_host = slots, to_host(found)

    def there() -> Basis:
        subspace = cut(stored, placement, on_host.result())
        return Basis(subspace, product.samples, product.kept, learnt)

    return Launched(there)


def _recorded(
    engine: Recorder, work: KrylovBasis, product: CurvatureProduct, batch: Batch, slots: Tensor
) -> "RecordedSpace | None":
    """The directions by recordings; None if they cannot be recorded or are stale."""
    D = work.preconditioner
    if not (work.lasting and isinstance(D, InPlace) and engine.are_fresh(batch)):
        return None

    def make(capture: Capture, network: Network) -> RecordedSpace:
        return RecordedSpace(work.curvature, D, batch, slots, work.most_previous, capture, network)

    recorded = engine.graphs.made(_name(work), make, batch, fixed=(slots, *D.tensors))
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
        slots: the rows [K + m, n].
        previous: m.
        capture: records a function.
        network: the model, on aliases of its parameters.
    """

    def __init__(
        self,
        curvature: Curvature,
        preconditioner: InPlace,
        batch: Batch,
        slots: Tensor,
        previous: int,
        capture: Capture,
        network: Network,
    ) -> None:
        self._capture, self._network = capture, network
        self._foreign = is_foreign(preconditioner)
        self._gradient, self._scale = torch.zeros_like(slots[0]), slots.new_zeros(())

        def split_preconditioner() -> None:
            products = under_way()
            if products is not None:
                side_by_side(products.prepare(preconditioner.tensors))

        self._linearization = RecordedLinearization(
            curvature, batch, capture, network, split_preconditioner
        )
        parameters, curved = network.parameters, self._linearization.product

        def product(v: Tensor) -> Tensor:
            return parameters.scale_and_add_decay(curved(v), self._scale, v)

        rows, placement = StoredBasis.at(slots), Alone(len(self._gradient))
        self._space = KrylovSpace(rows, product, preconditioner, self._gradient, placement)
        self._recorded: dict[tuple[str, int], Recorded[Any]] = {}
        # All at once: autograd refuses the linearisation's graph after the parameters changed.
        fill_with_krylov_space(self, len(slots) - previous, previous)

    def load(self, batch: Batch, gradient: Tensor, scale: float) -> None:
        """Linearise at the current parameters over these samples, for this gradient."""
        self._gradient.copy_(gradient)
        self._scale.fill_(scale)
        self._linearization.load(batch)

    def begin(self) -> bool:
        """See `KrylovSpace`."""
        self._replay("begin", 0, self._space.begin)
        return True

    def add_next(self, k: int) -> bool:
        """See `KrylovSpace`."""
        self._replay("next", k, lambda: self._space.add_next(k))
        return True

    def add_previous(self, k: int) -> bool:
        """See `KrylovSpace`."""
        self._replay("previous", k, lambda: self._space.add_previous(k))
        return True

    def measure(self, k: int) -> None:
        """See `KrylovSpace`."""
        self._replay("measure", k, lambda: self._space.measure(k))

    def numbers(self) -> Tensor:
        """See `KrylovSpace`; overwritten by the next step."""
        found: Tensor = self._replay("numbers", 0, self._space.numbers)
        return found

    def _replay(self, what: str, k: int, function: Callable[[], Any]) -> Any:
        if (what, k) not in self._recorded:
            # Later directions run the same kernels as those before them.
            known = ("next", REHEARSED) in self._recorded and what == "next"
            self._recorded[what, k] = self._capture(
                self._network,
                function,
                rehearsal=_nothing if known else function,
                after=self._linearization.recorded,
                foreign=self._foreign,
            )
        found = self._recorded[what, k]
        found.graph.replay()
        return found.result


def _nothing() -> None:
    pass
