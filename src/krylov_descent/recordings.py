"""CUDA graphs: the kernels of a product or an evaluation, recorded once and launched as one.

On a GPU the step of a small net is bound by the host, which launches some hundred small kernels
for each product and each evaluation. All of them read the parameters in place and a batch of a
fixed size, so they are recorded at the first step and replayed afterwards: same kernels, same
numbers, without the host in between. Recording is for models up to `LARGEST` bytes; beyond, the
kernels are long enough to hide their launches, and memory is dearer.

What is recorded holds for the shapes, addresses and flags it was recorded with, which are compared
before each use. A Python number that a forward pass reads (an annealed weight, say) is none of
these, so once per step a few samples are run both ways; if they differ, everything is recorded
anew. A model that cannot be recorded is run as it is, and said so once.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from krylov_descent.batches import Batch, Tree, tensors_in
from krylov_descent.forward_mode import BatchProduct
from krylov_descent.losses import first_line
from krylov_descent.network import Network
from krylov_descent.parameters import FlatParameters

LARGEST = 16 << 20
PULSE_SAMPLES = 8
PULSE_TOLERANCE = 1e-3
WARM_UPS = 2

Result = TypeVar("Result")
Recorded = TypeVar("Recorded")
Key = tuple[Any, ...]


class Recordings:
    """What has been recorded of a network, by purpose.

    Args:
        network: whose parameters are read in place.
        wanted: False to record nothing.
    """

    def __init__(self, network: Network, wanted: bool) -> None:
        self._network, self._wanted = network, wanted
        self._held: dict[str, tuple[Key, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model lies elsewhere in memory, and is recorded anew.
        return vars(self) | {"_held": {}}

    @property
    def possible(self) -> bool:
        """Whether this network is one to record."""
        parameters = self._network.parameters
        size = parameters.numel * parameters.tensors[0].element_size()
        return self._wanted and parameters.device.type == "cuda" and size <= LARGEST

    def clear(self) -> None:
        """Forget everything: the model has changed."""
        self._held = {}

    def check(self, batch: Batch) -> None:
        """Run a few samples both ways, and forget everything if they differ."""
        if not self.possible:
            return
        few = batch.rows(0, PULSE_SAMPLES)
        pulse = self._get("pulse", few, RecordedLosses)
        if pulse is not None:
            fresh = self._network.sample_losses(few, eager=True).detach().double()
            error = (pulse(few).double() - fresh).abs().sum()
            if not bool(error <= PULSE_TOLERANCE * fresh.abs().sum()):
                self.clear()

    def losses(self, batch: Batch) -> "RecordedLosses | None":
        """The per-sample losses of a batch."""
        return self._get("losses", batch, RecordedLosses)

    def evaluation(self, batch: Batch) -> "RecordedEvaluation | None":
        """Sum of the losses of a batch, and its gradient."""
        return self._get("evaluation", batch, RecordedEvaluation)

    def product(
        self, batch: Batch, linearize: Callable[[Network, Batch], BatchProduct], kind: str
    ) -> "RecordedProduct | None":
        """Products with a curvature matrix over a batch."""
        return self._get(
            f"product {kind}",
            batch,
            lambda network, static: RecordedProduct(network, static, linearize),
        )

    def _get(
        self, name: str, batch: Batch, make: Callable[[Network, Batch], Recorded]
    ) -> Recorded | None:
        if not self.possible:
            return None
        key = self._key(batch)
        if name not in self._held or self._held[name][0] != key:
            self._held.pop(name, None)
            try:
                recorded = make(self._network, batch.map(torch.clone))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as problem:
                self._wanted = False
                self.clear()
                warnings.warn(
                    f"the model cannot be recorded as a CUDA graph ({first_line(problem)}); it "
                    "runs without, which is slower for small models",
                    stacklevel=2,
                )
                return None
            self._held[name] = (key, recorded)
        held: Recorded = self._held[name][1]
        return held

    def _key(self, batch: Batch) -> Key:
        network = self._network
        places = [*network.parameters.tensors, *network.eager.buffers()]
        return (
            tuple((t.shape, t.dtype) for t in tensors_in((batch.inputs, batch.targets))),
            tuple(t.data_ptr() for t in places),
            network.autocast,
            torch.backends.cuda.matmul.fp32_precision,
        )


class _Aliased(Network):
    """The network on aliases of its parameters: the same numbers, a place of their own in autograd.

    Autograd ties a parameter to the stream it was first used on, and holds on to that while any
    graph that uses it lives; a recording is made on a stream of its own.
    """

    def __init__(self, network: Network) -> None:
        vars(self).update(vars(network))
        self._original = network
        aliases = [p.detach().requires_grad_() for p in network.parameters.tensors]
        self.parameters = FlatParameters(aliases, network.parameters.weight_decay)

    def outputs(self, batch: Batch, *, eager: bool = False) -> Tree:
        original = self._original
        return original.call_with(
            self.parameters.tensors, self.names, lambda: original.outputs(batch, eager=eager)
        )


class RecordedLosses:
    """nᵢ of a batch [size]."""

    def __init__(self, network: Network, static: Batch) -> None:
        self._batch = static

        # With grad mode on, which a forward pass that differentiates by itself needs.
        self._graph, self._losses = _record(
            lambda: network.sample_losses(static, eager=True).detach()
        )

    def __call__(self, batch: Batch) -> Tensor:
        """The losses at the parameters as they are; overwritten by the next call."""
        _copy(batch, self._batch)
        self._graph.replay()
        return self._losses


class RecordedEvaluation:
    """Σ nᵢ of a batch, the L2 term, and ∂ Σ nᵢ / ∂θ."""

    def __init__(self, network: Network, static: Batch) -> None:
        self._batch = static
        network = _Aliased(network)
        parameters = network.parameters

        def run() -> tuple[Tensor, Tensor]:
            losses = network.sample_losses(static, eager=True)
            gradient = parameters.flatten(network.gradients(losses))
            total = losses.detach().sum(dtype=torch.float64)
            return torch.stack([total, parameters.decay_term()]), gradient

        self._graph, (self._values, self._gradient) = _record(run)

    def load(self, batch: Batch) -> None:
        """Take up the samples to be evaluated from now on."""
        _copy(batch, self._batch)

    def __call__(self) -> tuple[float, float, Tensor]:
        """Sum of losses, L2 term, and gradient [n] of the sum, a new vector."""
        self._graph.replay()
        total, decay = self._values.tolist()
        return total, decay, self._gradient.clone()


class RecordedProduct:
    """v → Σ over a batch of a curvature matrix times v.

    Two recordings: the linearisation, replayed once per step, whose saved activations stay where
    they are; and the product, which reads them.
    """

    def __init__(
        self,
        network: Network,
        static: Batch,
        linearize: Callable[[Network, Batch], BatchProduct],
    ) -> None:
        network = _Aliased(network)
        parameters = network.parameters
        self._batch = static
        self._vector = parameters.copy()
        self._linearization, product = _record(lambda: linearize(network, static))
        self._linearization.replay()
        self._graph, self._result = _record(
            lambda: parameters.flatten(product(parameters.pieces(self._vector))),
            pool=self._linearization.pool(),
        )
        self._autograd_graph = product  # holds the activations

    def load(self, batch: Batch) -> None:
        """Linearise at the parameters as they are, over these samples."""
        _copy(batch, self._batch)
        self._linearization.replay()

    def __call__(self, vector: Tensor) -> Tensor:
        """The product as a new vector [n]."""
        self._vector.copy_(vector)
        self._graph.replay()
        return self._result.clone()


def _copy(batch: Batch, static: Batch) -> None:
    pairs = zip(
        tensors_in((static.inputs, static.targets)),
        tensors_in((batch.inputs, batch.targets)),
        strict=True,
    )
    for target, source in pairs:
        target.copy_(source)


@functools.cache
def _recording_stream() -> torch.cuda.Stream:
    """One for everything: autograd runs a backward pass on the stream of its forward pass."""
    return torch.cuda.Stream()


def _record(
    function: Callable[[], Result], pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run a function a few times, so that libraries set themselves up, and record it."""
    current, side = torch.cuda.current_stream(), _recording_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            function()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=side):
            result = function()
    except BaseException:
        # torch leaves the recording's stream in place when the recording fails.
        torch.cuda.set_stream(current)
        raise
    return graph, result
