"""A function as a CUDA graph: a part of a step, or a product, recorded once and replayed.

What is recorded has copies of the tensors it is given, its own or another recording's, and reads
parameters in place. What repeats in it may be recorded by itself and inserted (`Inserted`).
"""

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.child_graphs import insert
from krylov_descent.cuda.graphs.parallel_branches import all_joined
from krylov_descent.cuda.graphs.recorded_operations import recorded_operations
from krylov_descent.cuda.triton.entry import possible, tensor_core_products
from krylov_descent.cuda.triton.launching import loaded_kernels_alone
from krylov_descent.curvature.forward_mode import BatchProduct
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import is_out_of_memory

# Parameters of a model from which on products on tensor cores are worth loading kernels for: of
# Linear layers with plain functions between them, and of others, where few products are large.
SMALLEST_STACK, SMALLEST_OTHER = 1 << 17, 1 << 20

Result = TypeVar("Result")
# From a network, a batch and other tensors to tensors, by kernels alone: nothing is read on the
# host, and nothing depends on what is not among the arguments or in the parameters.
Part = Callable[..., Any]


def is_on_tensor_cores(network: Network) -> bool:
    """Whether recordings of a network have all their products of float32 matrices on tensor cores.

    Others may have their largest ones there.
    """
    return network.is_stack and _is_large(network) and possible(network.parameters.device)


def is_foreign(given: object) -> bool:
    """Whether it is of a class that is not this library's."""
    return type(given).__module__.split(".")[0] != __name__.split(".", maxsplit=1)[0]


class Recording:
    """A part of a step, and the tensors that it reads.

    Args:
        network: that the part is about.
        part: what is recorded.
        batch: of samples; the part's own, or another recording's.
        given: other tensors, likewise.
        rehearsal: the part, or a short form of it.
        held: what the part has of its own, made before it is recorded: called as the part is, and
            given to it as `held`. None where it has nothing.
        foreign: whether there is code in it that is not this library's, and may set itself up when
            it is first run.

    Attributes:
        batch: as given.
        given: likewise.
        result: what the part returned when it was recorded: the same tensors each time, overwritten
            by the next call.
    """

    def __init__(
        self,
        network: Network,
        part: Part,
        batch: Batch,
        given: tuple[Tensor, ...],
        rehearsal: Part,
        held: Part | None = None,
        foreign: bool = False,
    ) -> None:
        self.batch, self.given = batch, given
        self._held = {} if held is None else {"held": held(network, batch, *given)}
        whole, short = (
            partial(form, network, batch, *given, **self._held) for form in (part, rehearsal)
        )
        found = None
        try:
            found = _record(network, whole, rehearsal=short, foreign=foreign)
        except RuntimeError as problem:
            if rehearsal is part or is_out_of_memory(problem):
                raise
        # A library may want to set itself up for a size that the short form does not have.
        found = found or _record(network, whole, rehearsal=whole, foreign=True)
        self._graph, self.result = found.graph, found.result

    def load(self, batch: Batch, given: tuple[Tensor, ...]) -> None:
        """Take up what is read from now on."""
        _copy(batch, self.batch)
        for target, source in zip(self.given, given, strict=True):
            target.copy_(source)

    def __call__(self) -> Any:
        """Replay; returns the result."""
        self._graph.replay()
        return self.result


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
        parameters = network.parameters
        self._batch = static
        self._vector = parameters.copy()
        prepare = partial(linearize, network, static)
        linearization = _record(network, prepare, rehearsal=prepare)
        self._linearization, product = linearization.graph, linearization.result
        self._linearization.replay()

        def apply() -> Tensor:
            return parameters.flatten(product(parameters.pieces(self._vector)))

        applied = _record(network, apply, rehearsal=apply, after=linearization)
        self._graph, self._result = applied.graph, applied.result
        self._before = linearization  # holds the activations

    def load(self, batch: Batch) -> None:
        """Linearise at the parameters as they are, over these samples."""
        _copy(batch, self._batch)
        self._linearization.replay()

    def __call__(self, vector: Tensor) -> Tensor:
        """The product as a new vector [n]."""
        self._vector.copy_(vector)
        self._graph.replay()
        return self._result.clone()


class Inserted(Generic[Result]):
    """A function that is recorded, for other recordings to have wherever it is called.

    Args:
        network: that it is about.
        function: of nothing.
        after: what is always called before it. Others of those that follow that may have memory in
            common with this, but for the results.
        foreign: see `Recording`.
    """

    def __init__(
        self,
        network: Network,
        function: Callable[[], Result],
        after: "Inserted[Any] | None" = None,
        *,
        foreign: bool = False,
    ) -> None:
        before: _Recorded[Any] | None = None if after is None else after._recorded
        self._recorded: _Recorded[Result] = _record(
            network, function, rehearsal=function, after=before, kept=True, foreign=foreign
        )

    def __call__(self) -> Result:
        """Its kernels, here; returns the same tensors each time, overwritten by the next call."""
        insert(self._recorded.graph)
        return self._recorded.result


class InsertedMap:
    """The same, of a vector.

    Args:
        network: that it is about.
        function: from a vector to a vector.
        vector: where it finds its argument; copied to there if it is elsewhere.
        after: see `Inserted`.
        foreign: see `Recording`.
    """

    def __init__(
        self,
        network: Network,
        function: Callable[[Tensor], Tensor],
        vector: Tensor,
        after: Inserted[Any],
        *,
        foreign: bool = False,
    ) -> None:
        self._vector = vector
        self._inserted = Inserted(network, partial(function, vector), after, foreign=foreign)

    def __call__(self, vector: Tensor) -> Tensor:
        """Its value; overwritten by the next call."""
        if vector.data_ptr() != self._vector.data_ptr():
            self._vector.copy_(vector)
        return self._inserted()


def _copy(batch: Batch, static: Batch) -> None:
    pairs = zip(
        tensors_in((static.inputs, static.targets)),
        tensors_in((batch.inputs, batch.targets)),
        strict=True,
    )
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr():  # it may be read where it is
            target.copy_(source)


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """One for everything: autograd runs a backward pass on the stream of its forward pass.

    It goes first, where branches fill the GPU: what they do is waited for later.
    """
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True, slots=True)
class _Recorded(Generic[Result]):
    """What was recorded.

    Attributes:
        graph: of kernels.
        result: of the function.
        products: what is known of the matrices in it, and holds it.
    """

    graph: torch.cuda.CUDAGraph
    result: Result
    products: Any


def _record(
    network: Network,
    function: Callable[[], Result],
    *,
    rehearsal: Callable[[], Any],
    after: _Recorded[Any] | None = None,
    kept: bool = False,
    foreign: bool = False,
) -> _Recorded[Result]:
    """Record a function; after a rehearsal where something may have to set itself up.

    Args:
        network: that the function is about.
        function: what to record.
        rehearsal: it, or a short form of it.
        after: what is replayed before this, and whose memory it may use.
        kept: whether it is to be inserted into others.
        foreign: see `Recording`.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    before, pool = (None, None) if after is None else (after.products, after.graph.pool())
    products: Callable[[], AbstractContextManager[Any]] = nullcontext
    if _is_large(network):
        products = partial(tensor_core_products, device, before, sparing=not network.is_stack)
    current, side = torch.cuda.current_stream(), _recording_stream(torch.cuda.current_device())
    capture = partial(_captured, function, products, side, pool, kept)
    side.wait_stream(current)
    if not foreign and _may_be_recorded_at_once(network):
        # All that may be missing is a kernel, which says so.
        with suppress(RuntimeError), loaded_kernels_alone():
            return capture()
    with torch.cuda.stream(side), recorded_operations(products()):
        rehearsal()
    current.wait_stream(side)
    try:
        return capture()
    except torch.OutOfMemoryError:
        # What torch keeps for later is of no use to a recording, which has memory of its own.
        torch.cuda.empty_cache()
        return capture()


def _is_large(network: Network) -> bool:
    """Whether its products are worth loading kernels for."""
    return network.parameters.numel >= (SMALLEST_STACK if network.is_stack else SMALLEST_OTHER)


def _may_be_recorded_at_once(network: Network) -> bool:
    """Whether all kernels are this library's, or such that the network's probe has run before."""
    in_float32 = network.parameters.dtype is torch.float32 and network.autocast is None
    return in_float32 and network.is_plain and is_on_tensor_cores(network)


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """For a while Python does not look for what is not used any more.

    What is let go may wait for the GPU, or free memory of it, which ends a recording.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _give_up(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a recording that failed."""
    try:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # torch warns of a graph with nothing in it
        graph.capture_end()
    except RuntimeError:
        # CUDA had ended it, and torch did not see the end: memory is still set aside for it, and
        # random numbers wait until another one ends.
        device = torch.cuda.current_device()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
        with suppress(RuntimeError):
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            other.capture_end()


def _captured(
    function: Callable[[], Result],
    products: Callable[[], AbstractContextManager[Any]],
    side: torch.cuda.Stream,
    pool: Any,
    kept: bool,
) -> _Recorded[Result]:
    """What `torch.cuda.graph` does, but for giving back all memory that is not in use.

    That took a fifth of a second, as long as to record a small part.
    """
    graph, pool = torch.cuda.CUDAGraph(keep_graph=kept), pool or torch.cuda.graph_pool_handle()
    with torch.cuda.stream(side), _nothing_collected():
        # Other threads, of data loaders, may go on copying to the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with recorded_operations(products()) as known, all_joined():
                result = function()
        except BaseException:
            _give_up(graph, pool)
            raise
        graph.capture_end()
    return _Recorded(graph, result, known)
