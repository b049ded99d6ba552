"""Whether what has been recorded of a network is still what it does.

A Python number that a forward pass reads (an annealed weight, say) is none of what a recording is
known by (see `graph_cache`), and neither is a flag. So once in each step, and outside of steps at
each use, a few samples are run both ways. If their losses differ by a thousandth, or the autograd
graph has other operations than at the comparison before (a penalty is switched on, if only a small
one), the recordings are stale. (Mini-batches are recorded on request alone: with dropout both ways
always differ.)
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
from krylov_descent.cuda.graphs.host_transfer import OnTheWay
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.layers.graph_walks import structure
from krylov_descent.objective.network import Network
from krylov_descent.runtime.precision import precisions

PULSE, PULSE_SAMPLES = "pulse", 8
PULSE_TOLERANCE = 1e-3

Precision = tuple[str, str]


class Staleness:
    """Compares recordings with the network, once in a step for each precision.

    Args:
        network: that was recorded.
        graphs: what was recorded of it.

    Attributes:
        refuted: how often recordings were found stale.
    """

    def __init__(self, network: Network, graphs: GraphCache) -> None:
        self._network, self._graphs = network, graphs
        self._structures: dict[tuple[Any, ...], int] = {}
        self._checked: set[Precision] = set()
        self._open: dict[Precision, OnTheWay | _Question] = {}
        self.refuted = 0

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"_structures": {}, "_checked": set(), "_open": {}}
        return vars(self) | nothing

    def begin_step(self) -> None:
        """Nothing is known of the step that begins."""
        self._checked, self._open = set(), {}

    def clear(self) -> None:
        """The model has changed: there is nothing to compare its graph with."""
        self._structures = {}

    def compare(self, batch: Batch, losses: Tensor | None = None, *, later: bool = False) -> None:
        """Run a few samples both ways, where that was not done in this step.

        The answer is not waited for: see `answer`.

        Args:
            batch: whose first samples are run.
            losses: of these, as the recording has them that was loaded last, and replayed. One
                that was made just now tells nothing of those before it, and is not asked.
            later: whether to run the model itself only when the answer is asked for, beside all
                that is launched from now on.
        """
        # For each precision: Hessian-Free may have tf32 for its products alone.
        precision = precisions()
        if precision in self._checked or precision in self._open:
            return
        few = batch.rows(0, PULSE_SAMPLES)
        if losses is None or self._graphs.loaded_is_new:
            recording = self._graphs.load(f"{PULSE} in {precision}", _losses, few)
            if recording is None:
                return
            # Here, in the order of all recordings: two at once might use memory of one library.
            losses = recording()
        # Where a forward pass may write to buffers, nothing else may be under way.
        if later and few.size and losses.is_cuda and not self._graphs.known.modules:
            moment = torch.cuda.current_stream(losses.device).record_event()
            self._open[precision] = _Question(few, losses, moment)
        else:
            self._open[precision] = self._agreement(self._network, few, losses)

    def answer(self) -> bool:
        """Whether all that was compared agrees, which is waited for."""
        fresh = True
        while self._open:
            precision, found = self._open.popitem()
            if isinstance(found, _Question):
                # On a stream of its own, with a place of its own in autograd: see `Aliased`.
                with _beside_what_followed(found.moment, found.losses.device):
                    found = self._agreement(Aliased(self._network), found.few, found.losses)
            agree, telling = found.read()
            if telling:
                self._checked.add(precision)
            fresh = fresh and (bool(agree) or not telling)
        self.refuted += not fresh
        return fresh

    def _agreement(self, network: Network, few: Batch, recorded: Tensor) -> OnTheWay:
        """Whether the network does now what was recorded of it, and whether that can be told."""
        losses = network.sample_losses(few, eager=True)
        fresh = losses.detach().double()
        error, size = (recorded.double() - fresh).abs().sum(), fresh.abs().sum()
        # Losses that are zero, of targets to ignore, or not finite tell nothing.
        tell = (size > 0) & size.isfinite()
        agree = error <= PULSE_TOLERANCE * size
        if not self._is_as_before(network, few, losses):
            agree, tell = torch.zeros_like(agree), torch.ones_like(tell)
        return OnTheWay(torch.stack([agree, tell]))

    def _is_as_before(self, network: Network, few: Batch, losses: Tensor) -> bool:
        """Whether the graph of the losses is as at the last comparison, where there was one."""
        if not losses.requires_grad:
            return True
        kind = network.autocast, *(t.shape for t in tensors_in((few.inputs, few.targets)))
        now = structure([losses], network.parameters.tensors)
        before, self._structures[kind] = self._structures.get(kind, now), now
        return before == now


@dataclass(frozen=True, slots=True)
class _Question:
    """A few samples by a recording, to be compared with what the model does now.

    Attributes:
        few: the samples, m of them.
        losses: as recorded [m]; overwritten when it is replayed again.
        moment: at which they were launched.
    """

    few: Batch
    losses: Tensor
    moment: torch.cuda.Event


@contextmanager
def _beside_what_followed(moment: torch.cuda.Event, device: torch.device) -> Iterator[None]:
    """For a while kernels wait for those launched before a moment, not for what followed it.

    Nothing that they read may be written to by what followed. All that is launched afterwards
    waits for them.
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
    """One that goes first where others fill a GPU, and is none of those that are recorded on."""
    return torch.cuda.Stream(device, priority=-1)


def _losses(network: Network, batch: Batch) -> Tensor:
    # With grad mode on, which a forward pass that differentiates by itself needs.
    return network.sample_losses(batch, eager=True).detach()
