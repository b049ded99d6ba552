"""What has been recorded of a network: the kernels of parts of a step, each launched as one.

On a GPU the step of a small net is bound by the host, which launches some hundred small kernels for
each product and each evaluation. All of them read the parameters in place and a batch of a fixed
size, so they are recorded at an early step (see `cuda_graphs`) and replayed afterwards: the same
numbers to rounding, without the host in between. Recording is for models up to `LARGEST` bytes;
beyond, the kernels are long enough to hide their launches, and memory is dearer.

What is recorded holds for the shapes, addresses and flags it was recorded with, which are compared
before each use. A Python number that a forward pass reads (an annealed weight, say) is none of
these, so at each step, and outside of steps at each use, a few samples are run both ways; if they
differ by a thousandth, everything is recorded anew. (Mini-batches are recorded on request alone:
with dropout both ways always differ.) What cannot be recorded is run as it is, and said so once.
"""

import functools
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from krylov_descent.batches import Batch, Tree, tensors_in
from krylov_descent.branches import begin
from krylov_descent.cuda_graphs import Part, RecordedProduct, Recording
from krylov_descent.forward_mode import BatchProduct
from krylov_descent.messages import first_line
from krylov_descent.network import Network, modules_in
from krylov_descent.on_the_way import OnTheWay
from krylov_descent.parameters import FlatParameters
from krylov_descent.precision import precisions
from krylov_descent.tensor_cores.entry import under_way

LARGEST = 16 << 20
PULSE, PULSE_SAMPLES = "pulse", 8
PULSE_TOLERANCE = 1e-3

Recorded = TypeVar("Recorded")
Key = tuple[Any, ...]
Precision = tuple[str, str]


class Recordings:
    """What has been recorded of a network, by name.

    Args:
        network: whose parameters are read in place.
        wanted: False to record nothing.

    Attributes:
        refuted: how often they were seen not to hold.
    """

    def __init__(self, network: Network, wanted: bool) -> None:
        self._network, self._wanted = network, wanted
        self._held: dict[str, tuple[Key, Any]] = {}
        self._asked: dict[str, Key] = {}
        self._impossible: set[str] = set()
        self._places: dict[str, tuple[int, ...]] = {}
        self._loaded_is_new = False
        self._room: Tensor | None = None
        self._step: _Known | None = None
        self._meanwhile: Callable[[], Any] | None = None
        self._postpones = False
        self.refuted = 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model lies elsewhere in memory, and is recorded anew.
        nothing: dict[str, Any] = {"_held": {}, "_asked": {}, "_places": {}}
        nothing |= {"_room": None, "_step": None, "_meanwhile": None, "_postpones": False}
        return vars(self) | nothing

    @property
    def possible(self) -> bool:
        """Whether this network is one to record."""
        parameters = self._network.parameters
        size = parameters.numel * parameters.tensors[0].element_size()
        return self._wanted and parameters.device.type == "cuda" and size <= LARGEST

    def clear(self) -> None:
        """Forget everything: the model has changed."""
        self._forget()
        self._room = None

    def _forget(self) -> None:
        self._held, self._asked, self._impossible = {}, {}, set()

    def release(self, *, but: Collection[str]) -> None:
        """Let go of all but these, and of their memory: the rest will be others from now on."""
        # With the pulses: only one as old as a recording can tell whether that still holds.
        self._held = {
            name: held for name, held in self._held.items() if name in but or name.startswith(PULSE)
        }
        self._asked = {}

    def room(self, rows: int, like: Tensor) -> Tensor:
        """A place for that many vectors like this one, the same at every step."""
        kind = (rows, len(like)), like.dtype, like.device
        if self._room is None or (self._room.shape, self._room.dtype, self._room.device) != kind:
            self._room = like.new_zeros(rows, len(like))
        return self._room

    @property
    def in_step(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """For a while what the network computes does not change, and is looked at once."""
        self._step = _Known.of(self._network)
        try:
            yield
        finally:
            self._step = None

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
        return _now(self._network.parameters.device) if self.possible else None

    def has(self, name: str) -> bool:
        """Whether there is a recording of this name, be it for other samples."""
        return name in self._held

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
        precision, known = precisions(), self._step
        if known is not None and (precision in known.looked_at or precision in known.open):
            return True
        few = batch.rows(0, PULSE_SAMPLES)
        if losses is None or self._loaded_is_new:
            recording = self.load(f"{PULSE} in {precision}", _losses, few)
            if recording is None:
                return True
            # Here, among other recordings: two at once might use the same memory of a library.
            losses = recording()
        if known is not None and self._postpones:
            # Where a forward pass may write to buffers, nothing else may be under way.
            if known.has_buffers:
                known.open[precision] = self._compare(_Pulse(few, losses, None))
            else:
                now = _now(self._network.parameters.device)
                known.open[precision] = _Pulse(few, losses, now)
            self.work_meanwhile()
            return True
        found = self._compare(_Pulse(few, losses, None))
        self.work_meanwhile()
        return self._decide(precision, found)

    def answer(self) -> None:
        """Do what `hold` does, where that was postponed: forget them if they do not hold.

        Ask when all that was to be launched meanwhile is, but for what changes parameters.
        """
        while self._step is not None and self._step.open:
            precision, question = self._step.open.popitem()
            found = self._compare(question) if isinstance(question, _Pulse) else question
            self._decide(precision, found)

    def _compare(self, pulse: "_Pulse") -> OnTheWay:
        """Whether the network does now what was recorded of it, and whether that can be told."""
        # On a stream of its own with a place of its own in autograd: see `Aliased`.
        network = self._network if pulse.moment is None else Aliased(self._network)
        with beside_what_follows(pulse.moment, network.parameters.device):
            fresh = network.sample_losses(pulse.few, eager=True).detach().double()
            error, size = (pulse.losses.double() - fresh).abs().sum(), fresh.abs().sum()
            # Losses that are zero, of targets to ignore, or not finite tell nothing.
            tell = (size > 0) & size.isfinite()
            return OnTheWay(torch.stack([error <= PULSE_TOLERANCE * size, tell]))

    def _decide(self, precision: Precision, found: OnTheWay) -> bool:
        agree, telling = found.read()
        if self._step is not None and telling:
            self._step.looked_at.add(precision)
        if agree or not telling:
            return True
        self.refuted += 1
        self._forget()
        return False

    def load(
        self,
        name: str,
        part: Part,
        batch: Batch,
        *given: Tensor,
        fixed: tuple[Tensor, ...] = (),
        rehearsal: Part | None = None,
        held: Part | None = None,
        when_repeated: bool = False,
        where_it_is: bool = False,
        since: torch.cuda.Event | None = None,
    ) -> "Recording | None":
        """The recording of `part(network, batch, *given)`; None where that is not possible.

        Args:
            name: of the part.
            part: what is recorded, if it was not before.
            batch: of samples; copied to where the recording reads them.
            given: other tensors, copied likewise.
            fixed: tensors that the part reads where they are.
            rehearsal: a short form of the part with the same kinds of kernels, to be run once
                before it is recorded, where the part itself would take long.
            held: what the part and its short form have of their own; see `Recording`.
            when_repeated: record it only when it is asked for a second time in a row for such a
                batch.
            where_it_is: read the batch there, while it is always in the same place; copies of a
                large one would take their time at every call.
            since: a moment at which the recording was not in use any more, and after which nothing
                was written to what is to be copied: that is not to wait for what followed. None
                for now.
        """
        if not self._may_be_recorded(name):
            return None
        in_place = where_it_is and self._stays(name, batch)
        read = tensors_in((batch.inputs, batch.targets)) if in_place else ()

        def record(network: Network) -> Recording:
            own = tuple(tensor.clone() for tensor in given)
            read_from = batch if in_place else batch.map(torch.clone)
            return Recording(network, part, read_from, own, rehearsal or part, held)

        key = self._key(batch, given, (*fixed, *read))
        is_new = not self._is_held(name, key)
        recording = self._get(name, key, record, when_repeated=when_repeated)
        if recording is not None:
            self._loaded_is_new = is_new
            # One that is new may have memory that something else was using at that moment.
            moment = None if is_new else since
            with beside_what_follows(moment, self._network.parameters.device):
                recording.load(batch, given)
        return recording

    def beside(
        self,
        other: Recording,
        name: str,
        part: Part,
        *,
        fixed: tuple[Tensor, ...] = (),
        held: Part | None = None,
    ) -> "Recording | None":
        """The recording of a part that reads what another recording was given, where that has it.

        Args:
            other: which is loaded before each use.
            name: of the part.
            part: what is recorded, if it was not before; called as the other's is.
            fixed: further tensors that the part reads where they are.
            held: see `load`.
        """
        batch, given = other.batch, other.given

        def record(network: Network) -> Recording:
            return Recording(network, part, batch, given, part, held)

        if not self._may_be_recorded(name):
            return None
        read = (*tensors_in((batch.inputs, batch.targets)), *given, *fixed)
        return self._get(name, self._key(batch, given, read), record)

    def product(
        self, batch: Batch, linearize: Callable[[Network, Batch], BatchProduct], kind: str
    ) -> "RecordedProduct | None":
        """Products with a curvature matrix over a batch."""
        name = f"product {kind}"
        if not self._may_be_recorded(name):
            return None

        def record(network: Network) -> RecordedProduct:
            return RecordedProduct(network, batch.map(torch.clone), linearize)

        return self._get(name, self._key(batch, (), ()), record)

    def _stays(self, name: str, batch: Batch) -> bool:
        """Whether the batches for a part have always been in the same place."""
        place = tuple(t.data_ptr() for t in tensors_in((batch.inputs, batch.targets)))
        if self._places.setdefault(name, place) != place:
            self._places[name] = ()  # where none is
        return self._places[name] == place

    def _may_be_recorded(self, name: str) -> bool:
        return self.possible and name not in self._impossible

    def _is_held(self, name: str, key: Key) -> bool:
        return name in self._held and self._held[name][0] == key

    def _get(
        self,
        name: str,
        key: Key,
        record: Callable[[Network], Recorded],
        *,
        when_repeated: bool = False,
    ) -> Recorded | None:
        if not self._is_held(name, key):
            self._held.pop(name, None)
            sizes = key[0]  # such a batch, wherever it is
            asked, self._asked[name] = self._asked.get(name), sizes
            if when_repeated and asked != sizes:
                return None
            try:
                # What is recorded is what the current device does, whichever has the parameters.
                with torch.cuda.device(self._network.parameters.device):
                    recorded = record(Aliased(self._network))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as problem:
                if not self._impossible:
                    warnings.warn(
                        f"the model cannot be recorded as a CUDA graph ({first_line(problem)}); "
                        "it runs without, which is slower for small models",
                        stacklevel=2,
                    )
                self._impossible.add(name)
                return None
            self._held[name] = (key, recorded)
        held: Recorded = self._held[name][1]
        return held

    def _key(self, batch: Batch, given: tuple[Tensor, ...], fixed: tuple[Tensor, ...]) -> Key:
        network = self._network
        copied = [*tensors_in((batch.inputs, batch.targets)), *given]
        known = self._step or _Known.of(network)
        kind = network.parameters.device.type
        return (
            tuple((t.shape, t.dtype) for t in copied),
            tuple((t.data_ptr(), t.shape, t.stride()) for t in (*known.tensors(), *fixed)),
            # Of a step that is under way, and around everything else.
            network.autocast,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            precisions(),
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the network for a step: to look through all its modules takes a while.

    Attributes:
        parameters: all of them; what they hold may be replaced.
        modules: those with buffers, which a forward pass may replace.
        looked_at: the precisions in which recordings were seen to hold, or were forgotten.
        open: those in which it is to be seen whether they hold: by a comparison that is still to
            come, or one whose answer is to be read.
    """

    parameters: list[nn.Parameter]
    modules: list[nn.Module]
    looked_at: set[Precision] = field(default_factory=set)
    open: dict[Precision, "_Pulse | OnTheWay"] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network) -> "_Known":
        """A model and a loss that nothing is known of yet."""
        roots = [m for m in (network.eager, network.loss.module) if isinstance(m, nn.Module)]
        modules = [m for root in roots for m in modules_in(root)]
        parameters = [p for m in modules for p in m._parameters.values() if p is not None]
        return cls(parameters, [m for m in modules if m._buffers])

    @property
    def has_buffers(self) -> bool:
        """Whether there is any."""
        return any(b is not None for module in self.modules for b in module._buffers.values())

    def tensors(self) -> Iterator[Tensor]:
        """All that a forward pass reads where it is."""
        yield from self.parameters
        for module in self.modules:
            yield from module.buffers(recurse=False)


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


def _now(device: torch.device) -> torch.cuda.Event | None:
    """The moment until which kernels were launched; None where that makes no difference."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def beside_what_follows(moment: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """For a while kernels wait for those launched before a moment alone, not for what followed it.

    All that is launched afterwards waits for them. So nothing that they read may be written to by
    what followed the moment; and no memory that is let go meanwhile is used again too early.
    """
    if moment is None:
        yield
        return
    current, own = torch.cuda.current_stream(device), _stream_beside(device)
    own.wait_event(moment)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        current.wait_stream(own)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One that goes first, where others fill a GPU, and is none of those that are recorded on."""
    return torch.cuda.Stream(device, priority=-1)


class Aliased(Network):
    """The network on aliases of its parameters: the same numbers, a place of their own in autograd.

    Autograd ties a parameter to the stream it was first used on, and holds on to that while any
    graph that uses it lives; a recording is made on a stream of its own.

    Args:
        network: the network itself.
        point: other numbers [n] in place of its parameters'.
    """

    def __init__(self, network: Network, point: Tensor | None = None) -> None:
        vars(self).update(vars(network))
        self._original, parameters = network, network.parameters
        tensors = parameters.tensors if point is None else parameters.pieces(point)
        aliases = [tensor.detach().requires_grad_() for tensor in tensors]
        self.parameters = FlatParameters(aliases, parameters.weight_decay)

    def at(self, point: Tensor) -> "Aliased":
        """The same at another point [n], which the parameters know nothing of."""
        return Aliased(self._original, point)

    @property
    def original(self) -> Network:
        return self._original

    def outputs(self, batch: Batch, *, eager: bool = False) -> Tree:
        products, original = under_way(), self._original
        if products is not None:
            differentiated = self.loss.is_plain_cross_entropy and torch.is_grad_enabled()
            targets = tensors_in(batch.targets) if differentiated else []
            matrices = [*self.parameters.tensors, *tensors_in(batch.inputs)]
            begin(products.prepare(matrices, targets))
        return original.call_with(
            self.parameters.tensors, self.names, lambda: original.outputs(batch, eager=eager)
        )


def _losses(network: Network, batch: Batch) -> Tensor:
    # With grad mode on, which a forward pass that differentiates by itself needs.
    return network.sample_losses(batch, eager=True).detach()
