"""Recordings of curvature products."""

from collections.abc import Callable
from functools import partial

import torch
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
        partial(RecordedProduct, work.curvature, work.batch, work.room is not None),
        work.batch,
    )
    if recorded is None:
        return Launched(work.run)
    recorded.load(work.batch)
    return Launched.done(recorded)


def product_name(curvature: Curvature) -> str:
    """The name of the recording of products with a curvature."""
    return f"product {curvature.kind}"


class RecordedLinearization:
    """The forward pass that products read, replayed once per step.

    Args:
        curvature: linearises the network.
        batch: samples in the shape of those that `load` will get.
        keeps_jacobian: whether products are by J, in the memory of the recording.
        capture: records a function.
        network: the model, on aliases of its parameters.
        prepare: what else to replay before the products.

    Attributes:
        recorded: the recording, which those of products come after.
    """

    def __init__(
        self,
        curvature: Curvature,
        batch: Batch,
        keeps_jacobian: bool,
        capture: Capture,
        network: Network,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._batch = batch.map(Tensor.clone)
        room = torch.empty if keeps_jacobian else None

        def linearize() -> Product:
            prepare()
            return curvature.flat_product(network, self._batch, room)

        self.recorded = capture(network, linearize, rehearsal=linearize)
        self.recorded.graph.replay()

    @property
    def product(self) -> Product:
        """v → Hv summed over the samples, for other recordings: reads activations, or J."""
        return self.recorded.result

    def load(self, batch: Batch) -> None:
        """Linearise at the current parameters, over these samples."""
        copy_batch(batch, self._batch)
        self.recorded.graph.replay()


class RecordedProduct:
    """The product of the curvature matrix, summed over a batch, with a vector v.

    Args:
        curvature: linearises the network.
        batch: samples in the shape of those that `load` will get.
        keeps_jacobian: whether products are by J.
        capture: records a function.
        network: the model, on aliases of its parameters.
    """

    def __init__(
        self,
        curvature: Curvature,
        batch: Batch,
        keeps_jacobian: bool,
        capture: Capture,
        network: Network,
    ) -> None:
        self._vector = vector = network.parameters.copy()
        self._linearization = linearization = RecordedLinearization(
            curvature, batch, keeps_jacobian, capture, network
        )
        apply = partial(linearization.product, vector)
        self._product = capture(network, apply, rehearsal=apply, after=linearization.recorded)

    def load(self, batch: Batch) -> None:
        """Linearise at the current parameters, over these samples."""
        self._linearization.load(batch)

    def __call__(self, vector: Tensor) -> Tensor:
        """The product with a vector [n], as a new vector [n]."""
        self._vector.copy_(vector)
        self._product.graph.replay()
        return self._product.result.clone()
