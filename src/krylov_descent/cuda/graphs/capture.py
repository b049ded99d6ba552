"""Recording of functions, such as a part of a step or a product, as CUDA graphs.

A recording reads the parameters in place, and all other tensors from static copies, which it may
share with another recording.
"""

import functools
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.parallel_branches import all_joined
from krylov_descent.cuda.graphs.recorded_operations import recorded_operations
from krylov_descent.cuda.triton.availability import possible
from krylov_descent.cuda.triton.entry import tensor_core_products
from krylov_descent.cuda.triton.launching import loaded_kernels_alone
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import is_out_of_memory
from krylov_descent.runtime.private import end_allocation
from krylov_descent.runtime.threads import collector_paused, cuda_turn

# Least number of parameters for which tensor-core kernels are worth loading: in stacks of Linear
# layers with plain functions between them, and in other models, where few products are large.
SMALLEST_STACK, SMALLEST_OTHER = 1 << 17, 1 << 20

Result = TypeVar("Result")
# Maps a network, a batch and other tensors to tensors by kernels only: the host reads no result,
# and the result depends on the arguments and the parameters only.
Part = Callable[..., Any]


def is_on_tensor_cores(network: Network) -> bool:
    """Whether recordings of a network compute all float32 matrix products on tensor cores.

    Recordings of other networks may compute only the largest products there.
    """
    return network.is_stack and is_large(network) and possible(network.parameters.device)


def is_foreign(given: object) -> bool:
    """Whether the class of an object is defined outside of this library."""
    return type(given).__module__.split(".")[0] != __name__.split(".", maxsplit=1)[0]


class Recording:
    """A recorded part of a step, and the static tensors that it reads.

    Args:
        capture: makes the graph.
        network: the network that the part works on.
        part: the function to record.
        batch: static samples, owned by this recording or by another one.
        given: other static tensors, likewise.
        rehearsal: warm-up: the part or a shorter form of it.
        held: makes the state of the part before it is recorded. It has the part's arguments, and
            the part gets its result as `held`. None for a part without state.
        foreign: whether the part runs code from outside of this library, which may need a warm-up.

    Attributes:
        batch: as given.
        given: as given.
        result: the tensors that the part returned when recorded; each replay overwrites them.
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
        # A library may need a warm-up for a size that the short form does not have.
        found = found or capture(network, whole, rehearsal=whole, foreign=True)
        self._graph, self.result = found.graph, found.result

    def load(self, batch: Batch, given: tuple[Tensor, ...]) -> None:
        """Copy a batch and other tensors to the static tensors."""
        copy_batch(batch, self.batch)
        for target, source in zip(self.given, given, strict=True):
            target.copy_(source)

    def __call__(self) -> Any:
        """Replay the graph; returns `result`."""
        self._graph.replay()
        return self.result


def copy_batch(batch: Batch, static: Batch) -> None:
    """Copy samples to the static batch of a recording."""
    pairs = zip(
        tensors_in((static.inputs, static.targets)),
        tensors_in((batch.inputs, batch.targets)),
        strict=True,
    )
    for target, source in pairs:
        if target.data_ptr() != source.data_ptr():  # equal for a batch that is read in place
            target.copy_(source)


@functools.cache
def _recording_stream(device: int) -> torch.cuda.Stream:
    """The stream of all recordings: autograd runs a backward pass on its forward pass's stream.

    It has priority over the parallel branches, whose results are needed later.
    """
    return torch.cuda.Stream(device, priority=-1)


class Graph(Protocol):
    """Kernels launched as one."""

    def replay(self) -> None:
        """Launch the kernels."""


@dataclass(frozen=True, slots=True)
class Recorded(Generic[Result]):
    """A recorded function.

    Attributes:
        graph: replays the kernels.
        result: what the function returned.
        pool: memory pool of the graph.
        products: the `TensorCoreProducts` of the recording, which owns splits the graph reads.
    """

    graph: Graph
    result: Result
    pool: Any = None
    products: Any = None


class Capture(Protocol):
    """Type of functions that record, such as `capture_graph`."""

    def __call__(
        self,
        network: Network,
        function: Callable[[], Result],
        *,
        rehearsal: Callable[[], Any],
        after: Recorded[Any] | None = None,
        foreign: bool = False,
    ) -> Recorded[Result]:
        """Record a function, after a warm-up if one may be needed.

        Args:
            network: the network that the function works on.
            function: the function to record.
            rehearsal: warm-up: the function or a shorter form of it.
            after: a recording that is always replayed before this one; its memory pool is shared.
            foreign: see `Recording`.
        """


@cuda_turn()  # all threads share the recording stream
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
    # CUDA records on the current device, which may not be the one with the parameters.
    with torch.cuda.device(device):
        before, pool = (None, None) if after is None else (after.products, after.pool)
        products: Callable[[], AbstractContextManager[Any]] = nullcontext
        if is_large(network):
            products = partial(tensor_core_products, device, before, sparing=not network.is_stack)
        current, side = torch.cuda.current_stream(), _recording_stream(torch.cuda.current_device())
        capture = partial(_captured, function, products, side, pool)
        side.wait_stream(current)
        if not foreign and _may_be_recorded_at_once(network):
            # Without warm-up only a Triton kernel can be missing, which raises NotLoadedError.
            with suppress(RuntimeError), loaded_kernels_alone():
                return capture()
        with torch.cuda.stream(side), recorded_operations(products()):
            rehearsal()
        current.wait_stream(side)
        try:
            return capture()
        except torch.OutOfMemoryError:
            # A recording has its own memory pool and cannot use the blocks that torch caches, nor
            # those of recordings that nobody uses and the garbage collector has not seen yet.
            gc.collect()
            torch.cuda.empty_cache()
            return capture()


def is_large(network: Network) -> bool:
    """Whether the network has enough parameters for tensor-core kernels to pay."""
    return network.parameters.numel >= (SMALLEST_STACK if network.is_stack else SMALLEST_OTHER)


def _may_be_recorded_at_once(network: Network) -> bool:
    """Whether every kernel is either this library's or was run by the network's probe."""
    in_float32 = network.parameters.dtype is torch.float32 and network.autocast is None
    return in_float32 and network.is_plain and is_on_tensor_cores(network)


def _give_up(graph: torch.cuda.CUDAGraph, pool: Any, number: Tensor) -> None:
    """End a recording that failed, perhaps because there is no memory left.

    Args:
        graph: of the recording.
        pool: its memory.
        number: a tensor for the recording to write to: torch warns of an empty graph.
    """
    try:
        with suppress(RuntimeError):
            number.zero_()
        graph.capture_end()
    except RuntimeError:
        # CUDA had ended the capture without torch noticing. Torch still allocates from the pool,
        # and its random number generator stays in capture mode until another capture ends.
        device = torch.cuda.current_device()
        end_allocation(device, pool)
        with suppress(RuntimeError):
            other = torch.cuda.CUDAGraph()
            other.capture_begin(capture_error_mode="thread_local")
            number.zero_()
            other.capture_end()


def _captured(
    function: Callable[[], Result],
    products: Callable[[], AbstractContextManager[Any]],
    side: torch.cuda.Stream,
    pool: Any,
) -> Recorded[Result]:
    """Capture as `torch.cuda.graph` does, but without emptying the memory cache.

    Emptying the cache takes a fifth of a second, as long as the recording of a small part.
    """
    graph, pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    number = torch.empty(1, device="cuda")
    # Garbage collection may synchronise or free GPU memory, which would end the capture.
    with torch.cuda.stream(side), collector_paused:
        # "thread_local" lets the threads of data loaders copy to the device meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            with recorded_operations(products()) as known, all_joined():
                result = function()
        except BaseException:
            _give_up(graph, pool, number)
            raise
        graph.capture_end()
    return Recorded(graph, result, pool, known)
