"""Whether what has been recorded of a network is still what it does.

A Python number that a forward pass reads (an annealed weight, say) is none of what a recording is
known by (see `graph_cache`), and neither is a flag. So at each step, and outside of steps at
each use, a few samples are run both ways. If their losses differ by a thousandth, or the autograd
graph has other operations than at the comparison before (a penalty is switched on, if only a small
one), everything is recorded anew. (Mini-batches are recorded on request alone: with dropout both
ways always differ.) In a step the host need not wait for the answer, and has other things to do
meanwhile.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.cuda.graphs.graph_cache import RecordedParts
from krylov_descent.cuda.graphs.host_transfer import OnTheWay
from krylov_descent.cuda.graphs.side_stream import beside_what_follows, now
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.layers.graph_walks import structure
from krylov_descent.objective.network import Network
from krylov_descent.runtime.precision import precisions

PULSE, PULSE_SAMPLES = "pulse", 8
PULSE_TOLERANCE = 1e-3

Precision = tuple[str, str]


class Recordings(RecordedParts):
    """What has been recorded of a network, and whether it holds.

    Args:
        network: whose parameters are read in place.
        wanted: False to record nothing.

    Attributes:
        refuted: how often they were seen not to hold.
    """

    def __init__(self, network: Network, wanted: bool) -> None:
        super().__init__(network, wanted)
        self._looks: _Looks | None = None
        self._meanwhile: Callable[[], Any] | None = None
        self._postpones = False
        self._structures: dict[tuple[Any, ...], int] = {}
        self.refuted = 0

    def __getstate__(self) -> dict[str, Any]:
        nothing: dict[str, Any] = {"_looks": None, "_meanwhile": None, "_structures": {}}
        return super().__getstate__() | nothing | {"_postpones": False}

    def clear(self) -> None:
        """Forget everything: the model has changed."""
        super().clear()
        self._structures = {}

    def release(self, *, but: Collection[str]) -> None:
        """Let go of all but these, and of their memory: the rest will be others from now on."""
        # With the pulses: only one as old as a recording can tell whether that still holds.
        self._held = {
            name: held for name, held in self._held.items() if name in but or name.startswith(PULSE)
        }
        self._asked = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """For a while what the network computes does not change, and is looked at once."""
        with super().step():
            self._looks = _Looks()
            try:
                yield
            finally:
                self._looks = None

    @contextmanager
    def meanwhile(self, job: Callable[[], Any]) -> Iterator[None]:
        """For a while there is a job for the host to do when it would wait for the GPU."""
        before, self._meanwhile = self._meanwhile, job
        try:
            yield
        finally:
            self._meanwhile = before

    def work_meanwhile(self) -> None:
        """Do it now: kernels were launched, and what follows waits for them."""
        if self._meanwhile is not None:
            self._meanwhile()

    @contextmanager
    def postponed(self) -> Iterator[None]:
        """For a while of a step the host does not wait for the GPU to find out numbers.

        `hold` says yes, and leaves the question open. Whoever wants this asks for the `answer`
        later, and if that was no, does again what was done on trust. And vectors that are found
        meanwhile are overwritten when they are asked for again.
        """
        self._postpones = self.in_step
        try:
            yield
        finally:
            self._postpones = False

    @property
    def postpones(self) -> bool:
        """Whether numbers that the host would wait for are to be read later."""
        return self._postpones

    def now(self) -> torch.cuda.Event | None:
        """The moment until which kernels were launched; None where nothing is recorded."""
        return now(self._network.parameters.device) if self.possible else None

    def finish(self) -> None:
        """Wait for what was launched and not read: it writes to the host's memory, while it may."""
        device = self._network.parameters.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def hold(self, batch: Batch, losses: Tensor | None = None) -> bool:
        """Whether they are what the network does; if they are not, they are forgotten.

        Run a few samples both ways, where that was not done in this step. Ask while the GPU is
        busy, which hides what it costs.

        Args:
            batch: whose first samples are run.
            losses: of these, as the recording has them that was loaded last, and replayed. One
                that was made just now tells nothing of those before it, and is not asked.
        """
        # For each precision: Hessian-Free may have tf32 for its products alone.
        precision, looks = precisions(), self._looks
        if looks is not None and (precision in looks.looked_at or precision in looks.open):
            return True
        few = batch.rows(0, PULSE_SAMPLES)
        if losses is None or self._loaded_is_new:
            recording = self.load(f"{PULSE} in {precision}", _losses, few)
            if recording is None:
                return True
            # Here, among other recordings: two at once might use the same memory of a library.
            losses = recording()
        if looks is not None and self._postpones:
            # Where a forward pass may write to buffers, nothing else may be under way.
            if self._known.has_buffers:
                looks.open[precision] = self._compare(_Pulse(few, losses, None))
            else:
                moment = now(self._network.parameters.device)
                looks.open[precision] = _Pulse(few, losses, moment)
            self.work_meanwhile()
            return True
        found = self._compare(_Pulse(few, losses, None))
        self.work_meanwhile()
        return self._decide(precision, found)

    def answer(self) -> None:
        """Do what `hold` does, where that was postponed: forget them if they do not hold.

        Ask when all that was to be launched meanwhile is, but for what changes parameters.
        """
        while self._looks is not None and self._looks.open:
            precision, question = self._looks.open.popitem()
            found = self._compare(question) if isinstance(question, _Pulse) else question
            self._decide(precision, found)

    def _compare(self, pulse: "_Pulse") -> OnTheWay:
        """Whether the network does now what was recorded of it, and whether that can be told."""
        # On a stream of its own with a place of its own in autograd: see `Aliased`.
        network = self._network if pulse.moment is None else Aliased(self._network)
        with beside_what_follows(pulse.moment, network.parameters.device):
            losses = network.sample_losses(pulse.few, eager=True)
            fresh = losses.detach().double()
            error, size = (pulse.losses.double() - fresh).abs().sum(), fresh.abs().sum()
            # Losses that are zero, of targets to ignore, or not finite tell nothing.
            tell = (size > 0) & size.isfinite()
            agree = error <= PULSE_TOLERANCE * size
            if not self._is_as_before(network, pulse.few, losses):
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

    def _decide(self, precision: Precision, found: OnTheWay) -> bool:
        agree, telling = found.read()
        if self._looks is not None and telling:
            self._looks.looked_at.add(precision)
        if agree or not telling:
            return True
        self.refuted += 1
        self._forget()
        return False


@dataclass(frozen=True, slots=True)
class _Looks:
    """At recordings, in a step.

    Attributes:
        looked_at: the precisions in which recordings were seen to hold, or were forgotten.
        open: those in which it is to be seen whether they hold: by a comparison that is still to
            come, or one whose answer is to be read.
    """

    looked_at: set[Precision] = field(default_factory=set)
    open: dict[Precision, "_Pulse | OnTheWay"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Pulse:
    """A few samples by a recording, to be compared with what the network does now.

    Attributes:
        few: the samples, m of them.
        losses: as recorded [m]; overwritten when it is replayed again.
        moment: when they were launched, where the comparison is not to wait for what followed.
    """

    few: Batch
    losses: Tensor
    moment: torch.cuda.Event | None


def _losses(network: Network, batch: Batch) -> Tensor:
    # With grad mode on, which a forward pass that differentiates by itself needs.
    return network.sample_losses(batch, eager=True).detach()
