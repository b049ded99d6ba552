"""Curvature products as recordings."""

from functools import partial

from torch import Tensor

from krylov_descent.cuda.graphs.capture import Capture, copy_batch
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.curvature.products import Curvature, Linearization, Product
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched


def launch_linearization(engine: Recorder, work: Linearization) -> Launched[Product]:
    """v → Hv as one launch for each product."""
    if not engine.are_fresh(work.batch):
        return Launched(work.run)
    recorded = engine.graphs.made(
        product_name(work.curvature),
        partial(RecordedProduct, work.curvature, work.batch),
        work.batch,
    )
    if recorded is None:
        return Launched(work.run)
    recorded.load(work.batch)
    return Launched.done(recorded)


def product_name(curvature: Curvature) -> str:
    """Of the recording of products with a curvature."""
    return f"product {curvature.kind}"


class RecordedProduct:
    """v → Σ over a batch of a curvature matrix times v.

    Two recordings: the linearisation, replayed once per step, whose saved activations stay where
    they are; and the product, which reads them.

    Args:
        curvature: linearises.
        batch: samples like those that will be loaded.
        capture: records.
        network: the model, on aliases of its parameters.
    """

    def __init__(
        self, curvature: Curvature, batch: Batch, capture: Capture, network: Network
    ) -> None:
        self._batch = batch.map(Tensor.clone)
        self._vector = vector = network.parameters.copy()
        prepare = partial(curvature.flat_product, network, self._batch)
        self._linearization = capture(network, prepare, rehearsal=prepare)
        self._linearization.graph.replay()
        apply = partial(self._linearization.result, vector)
        self._product = capture(network, apply, rehearsal=apply, after=self._linearization)

    def load(self, batch: Batch) -> None:
        """Linearise at the parameters as they are, over these samples."""
        copy_batch(batch, self._batch)
        self._linearization.graph.replay()

    def __call__(self, vector: Tensor) -> Tensor:
        """The product as a new vector [n]."""
        self._vector.copy_(vector)
        self._product.graph.replay()
        return self._product.result.clone()
