"""Recordings of curvature products."""

from functools import partial

from torch import Tensor

from krylov_descent.cuda.graphs.capture import Capture, copy_batch
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.curvature.products import Curvature, Linearization, Product
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched


def launch_linearization(engine: Recorder, work: Linearization) -> Launched[Product]:
    """The product v → Hv, each by one launch; eager if it cannot be recorded or is stale."""
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
    """The name of the recording of products with a curvature."""
    return f"product {curvature.kind}"


class RecordedProduct:
    """The product of the curvature matrix, summed over a batch, with a vector v.

    The linearisation is one recording, replayed once per step. The product is another one, which
    reads the activations that the linearisation saved.

    Args:
        curvature: linearises the network.
        batch: samples in the shape of those that `load` will get.
        capture: records a function.
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
        """Linearise at the current parameters, over these samples."""
        copy_batch(batch, self._batch)
        self._linearization.graph.replay()

    def __call__(self, vector: Tensor) -> Tensor:
        """The product with a vector [n], as a new vector [n]."""
        self._vector.copy_(vector)
        self._product.graph.replay()
        return self._product.result.clone()
