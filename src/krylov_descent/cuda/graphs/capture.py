"""A function as a CUDA graph: a part of a step, or a product, recorded once and replayed.

What is recorded has copies of the tensors it is given, its own or another recording's, and reads
parameters in place.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.parallel_branches import all_joined
from krylov_descent.cuda.graphs.recorded_operations import recorded_operations
from krylov_descent.cuda.triton.entry import possible, tensor_core_products
from krylov_descent.cuda.triton.launching import loaded_kernels_alone
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import is_out_of_memory
from krylov_descent.runtime.private import end_allocation
from krylov_descent.runtime.threads import collector_paused, cuda_turn

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
        capture: makes the graph.
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
        capture: "Capture",
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
            found = capture(network, whole, rehearsal=short, foreign=foreign)
        except RuntimeError as problem:
            if rehearsal is part or is_out_of_memory(problem):
                raise
        # A library may want to set itself up for a size that the short form does not have.
        found = found or capture(network, whole, rehearsal=whole, foreign=True)
        self._graph, self.result = found.graph, found.result

    def load(self, batch: Batch, given: tuple[Tensor, ...]) -> None:
        """Take up what is read from now on."""
        copy_batch(batch, self.batch)
        for target, source in zip(self.given, given, strict=True):
            target.copy_(source)

    def __call__(self) -> Any:
        """Replay; returns the result."""
        self._graph.replay()
        return self.result


def copy_batch(batch: Batch, static: Batch) -> None:
    """Copy samples to where a recording reads them."""
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


class Graph(Protocol):
    """Kernels that are launched together."""

    def replay(self) -> None:
        """Launch them."""


@dataclass(frozen=True, slots=True)
class Recorded(Generic[Result]):
    """What was recorded.

    Attributes:
        graph: of kernels.
        result: of the function.
        pool: the memory that the graph has of its own.
        products: what is known of the matrices in it, and holds it.
    """

    graph: Graph
    result: Result
    pool: Any = None
    products: Any = None


class Capture(Protocol):
    """Records a function."""

    def __call__(
        self,
        network: Network,
        function: Callable[[], Result],
        *,
        rehearsal: Callable[[], Any],
        after: Recorded[Any] | None = None,
        foreign: bool = False,
    ) -> Recorded[Result]:
        """Record a function; after a rehearsal where something may have to set itself up.

        Args:
            network: that the function is about.
            function: what to record.
            rehearsal: it, or a short form of it.
            after: what is replayed before this, and whose memory it may use.
            foreign: see `Recording`.
        """


@cuda_turn()  # the stream is one for all threads
def capture_graph(
    network: Network,
    function: Callable[[], Result],
    *,
    rehearsal: Callable[[], Any],
    after: Recorded[Any] | None = None,
    foreign: bool = False,
) -> Recorded[Result]:
    """Record a function as a CUDA graph; see `Capture`."""
    device = network.parameters.device
    # What is recorded is what the current device does, whichever has the parameters.
    with torch.cuda.device(device):
        before, pool = (None, None) if after is None else (after.products, after.pool)
        products: Callable[[], AbstractContextManager[Any]] = nullcontext
        if _is_large(network):
            products = partial(tensor_core_products, device, before, sparing=not network.is_stack)
        current, side = torch.cuda.current_stream(), _recording_stream(torch.cuda.current_device())
        capture = partial(_captured, function, products, side, pool)
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
        end_allocation(device, pool)
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
) -> Recorded[Result]:
    """What `torch.cuda.graph` does, but for giving back all memory that is not in use.

    That took a fifth of a second, as long as to record a small part.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    # What is let go may wait for the GPU, or free memory of it, which ends a recording.
    with torch.cuda.stream(side), collector_paused:
        # Other threads, of data loaders, may go on copying to the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with recorded_operations(products()) as known, all_joined():
                result = function()
        except BaseException:
            _give_up(graph, pool)
            raise
        graph.capture_end()
    return Recorded(graph, result, pool, known)
