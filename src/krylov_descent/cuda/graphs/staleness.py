"""Detects whether the recordings of a network are stale.

The key of the graph cache does not see a Python number or flag that a forward pass reads, such as
an annealed weight. So once per step, and outside of steps at each use, a few samples are run by the
recording and by the model. The recordings are stale if the losses differ by a thousandth, or if the
autograd graph has other operations than at the previous comparison (a small penalty was switched
on, say). With dropout the losses always differ, so mini-batches are recorded on request only.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.cuda.graphs.graph_cache import GraphCache
from krylov_descent.cuda.graphs.host_transfer import to_host
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.layers.graph_walks import structure
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched
from krylov_descent.runtime.precision import precisions

PULSE, PULSE_SAMPLES = "pulse", 8
PULSE_TOLERANCE = 1e-3

Precision = tuple[str, str]


class Staleness:
    """Compares recordings with the network, once per step for each precision.

    Args:
        network: the recorded network.
        graphs: its recordings.

    Attributes:
        times_stale: how often recordings were found to be stale.
    """

    def __init__(self, network: Network, graphs: GraphCache) -> None:
        self._network, self._graphs = network, graphs
        self._structures: dict[tuple[Any, ...], int] = {}
        self._checked: set[Precision] = set()
        self._open: dict[Precision, Launched[Tensor] | _Question] = {}
        self.times_stale = 0

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"_structures": {}, "_checked": set(), "_open": {}}
        return vars(self) | nothing

    def begin_step(self) -> None:
        """Reset all checks at the beginning of a step."""
        self._checked, self._open = set(), {}

    def clear(self) -> None:
        """Forget the autograd graphs of earlier comparisons: the model has changed."""
        self._structures = {}

    def compare(self, batch: Batch, losses: Tensor | None = None, *, later: bool = False) -> None:
        """Launch the comparison on a few samples, unless this step has made it; see `answer`.

        Args:
            batch: its first samples are compared.
            losses: their losses by the recording that was loaded last. They are ignored if that
                recording is new, because then it says nothing about the older recordings.
            later: whether to run the model only in `answer`, on a separate stream in parallel to
                the kernels launched in between.
        """
        # For each precision, because Hessian-Free may use tf32 for its products only.
        precision = precisions()
        if precision in self._checked or precision in self._open:
            return
        few = batch.rows(0, PULSE_SAMPLES)
        if losses is None or self._graphs.loaded_is_new:
            recording = self._graphs.load(f"{PULSE} in {precision}", _losses, few)
            if recording is None:
                return
            # On the current stream: two recordings in parallel might share a library's workspace.
            losses = recording()
        # A forward pass that may write to buffers must not run in parallel to others.
        if later and few.size and losses.is_cuda and not self._graphs.known.modules:
            moment = torch.cuda.current_stream(losses.device).record_event()
            self._open[precision] = _Question(few, losses, moment)
        else:
            self._open[precision] = self._agreement(self._network, few, losses)

    def answer(self) -> bool:
        """Whether all comparisons agree or are inconclusive; waits for their results."""
        fresh = True
        while self._open:
            precision, found = self._open.popitem()
            if isinstance(found, _Question):
                # The separate stream needs parameter aliases: see `Aliased`.
                with _beside_what_followed(found.moment, found.losses.device):
                    found = self._agreement(Aliased(self._network), found.few, found.losses)
            agree, telling = found.result().tolist()
            if telling:
                self._checked.add(precision)
            fresh = fresh and (bool(agree) or not telling)
        self.times_stale += not fresh
        return fresh

    def _agreement(self, network: Network, few: Batch, recorded: Tensor) -> Launched[Tensor]:
        """Two flags [2]: whether recorded and eager losses agree, whether that is conclusive."""
        losses = network.sample_losses(few, eager=True)
        fresh = losses.detach().double()
        error, size = (recorded.double() - fresh).abs().sum(), fresh.abs().sum()
        # Inconclusive: losses that are zero (of ignored targets) or not finite.
        tell = (size > 0) & size.isfinite()
        agree = error <= PULSE_TOLERANCE * size
        if not self._is_as_before(network, few, losses):
            agree, tell = torch.zeros_like(agree), torch.ones_like(tell)
        return to_host(torch.stack([agree, tell]))

    def _is_as_before(self, network: Network, few: Batch, losses: Tensor) -> bool:
        """Whether the autograd graph of the losses equals that of the last comparison, if any."""
        if not losses.requires_grad:
            return True
        kind = network.autocast, *(t.shape for t in tensors_in((few.inputs, few.targets)))
        now = structure([losses], network.parameters.tensors)
        before, self._structures[kind] = self._structures.get(kind, now), now
        return before == now


@dataclass(frozen=True, slots=True)
class _Question:
    """A comparison for which the model is still to be run.

    Attributes:
        few: m samples.
        losses: their losses by the recording [m]; the next replay overwrites them.
        moment: event recorded behind the launch of the losses.
    """

    few: Batch
    losses: Tensor
    moment: torch.cuda.Event


@contextmanager
def _beside_what_followed(moment: torch.cuda.Event, device: torch.device) -> Iterator[None]:
    """Context: kernels run on a separate stream, which waits for an event on the current stream.

    Kernels launched after the event must not write to what these kernels read. Kernels launched
    after the context wait for it.
    """
    current, own = torch.cuda.current_stream(device), _own_stream(device)
    own.wait_event(moment)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        current.wait_stream(own)


@functools.cache
def _own_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of high priority that is never used for recording."""
    return torch.cuda.Stream(device, priority=-1)


def _losses(network: Network, batch: Batch) -> Tensor:
    # Grad mode stays on for forward passes that differentiate.
    return network.sample_losses(batch, eager=True).detach()
