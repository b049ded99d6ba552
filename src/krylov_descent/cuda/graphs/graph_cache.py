"""What has been recorded of a network: the kernels of parts of a step, each launched as one.

On a GPU the step of a small net is bound by the host, which launches some hundred small kernels for
each product and each evaluation. All of them read the parameters in place and a batch of a fixed
size, so they are recorded at an early step (see `capture`) and replayed afterwards: the same
numbers to rounding, without the host in between.

What is recorded holds for the shapes, addresses and flags it was recorded with, which are compared
before each use; `staleness` finds out whether something else has changed. What cannot be recorded
is run as it is, and said so once.
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from krylov_descent.cuda.graphs.aliased_network import Aliased
from krylov_descent.cuda.graphs.capture import Capture, Part, Recording
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import first_line, is_out_of_memory
from krylov_descent.runtime.precision import precisions
from krylov_descent.runtime.private import modules_in, own_buffers, own_parameters

Recorded = TypeVar("Recorded")
Key = tuple[Any, ...]


class GraphCache:
    """What has been recorded of a network, by name.

    A recording is known by the addresses that it reads, with shapes and strides: that is all a
    graph depends on. A tensor that is gone does no harm: whoever asks has another one, at another
    address, or is read at that address as well.

    Args:
        network: whose parameters are read in place.
        capture: makes the graphs.
    """

    def __init__(self, network: Network, capture: Capture) -> None:
        self._network, self._capture = network, capture
        self._held: dict[str, tuple[Key, Any]] = {}
        self._asked: dict[str, Key] = {}
        self._impossible: set[str] = set()
        self._places: dict[str, tuple[int, ...]] = {}
        self._room: Tensor | None = None
        self._step: _Known | None = None
        self.loaded_is_new = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model lies elsewhere in memory, and is recorded anew.
        nothing: dict[str, Any] = {"_held": {}, "_asked": {}, "_places": {}}
        return vars(self) | nothing | {"_room": None, "_step": None}

    def clear(self) -> None:
        """Forget everything: the model has changed."""
        self.forget()
        self._room = None

    def forget(self) -> None:
        """The same, but rows of a basis stay where they are."""
        self._held, self._asked, self._impossible = {}, {}, set()

    def room(self, rows: int, like: Tensor) -> Tensor:
        """A place for that many vectors like this one, the same at every step."""
        kind = (rows, len(like)), like.dtype, like.device
        if self._room is None or (self._room.shape, self._room.dtype, self._room.device) != kind:
            self._room = like.new_zeros(rows, len(like))
        return self._room

    def release(self, *, but: Collection[str]) -> None:
        """Let go of all but these, and of their memory: the rest will be others from now on."""
        self._held = {name: held for name, held in self._held.items() if name in but}
        self._asked = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """For a while the network has the same modules, and is looked through once."""
        self._step = _Known.of(self._network)
        try:
            yield
        finally:
            self._step = None

    @property
    def names(self) -> list[str]:
        """Of all that is recorded."""
        return list(self._held)

    def has(self, name: str) -> bool:
        """Whether there is a recording of this name, be it for other samples."""
        return name in self._held

    def load(
        self,
        name: str,
        part: Part,
        batch: Batch,
        *given: Tensor,
        fixed: tuple[Tensor, ...] = (),
        numbers: tuple[float, ...] = (),
        rehearsal: Part | None = None,
        held: Part | None = None,
        foreign: bool = False,
        when_repeated: bool = False,
        where_it_is: bool = False,
    ) -> "Recording | None":
        """The recording of `part(network, batch, *given)`; None where that is not possible.

        Args:
            name: of the part.
            part: what is recorded, if it was not before.
            batch: of samples; copied to where the recording reads them.
            given: other tensors, copied likewise.
            fixed: tensors that the part reads where they are.
            numbers: of the host that the part reads.
            rehearsal: a short form of the part with the same kinds of kernels, to be run once
                before it is recorded if need be, where the part itself would take long.
            held: what the part and its short form have of their own; see `Recording`.
            foreign: see there.
            when_repeated: record it only when it is asked for a second time in a row for such a
                batch.
            where_it_is: read the batch there, while it is always in the same place; copies of a
                large one would take their time at every call.
        """
        if not self._may_be_recorded(name):
            return None
        in_place = where_it_is and self._stays(name, batch)
        read = tensors_in((batch.inputs, batch.targets)) if in_place else ()

        def record(network: Network) -> Recording:
            own = tuple(tensor.clone() for tensor in given)
            read_from = batch if in_place else batch.map(torch.clone)
            form = rehearsal or part
            return Recording(self._capture, network, part, read_from, own, form, held, foreign)

        key = (*self._key(batch, given, (*fixed, *read)), numbers)
        is_new = not self._is_held(name, key)
        recording = self._get(name, key, record, when_repeated=when_repeated)
        if recording is not None:
            self.loaded_is_new = is_new
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
            return Recording(self._capture, network, part, batch, given, part, held)

        if not self._may_be_recorded(name):
            return None
        read = (*tensors_in((batch.inputs, batch.targets)), *given, *fixed)
        return self._get(name, self._key(batch, given, read), record)

    def made(
        self,
        name: str,
        make: Callable[[Capture, Network], Recorded],
        batch: Batch | None = None,
        *,
        fixed: tuple[Tensor, ...] = (),
    ) -> "Recorded | None":
        """What a function makes of several recordings; None where that is not possible.

        Args:
            name: of what is made.
            make: makes it, if it was not before, for a batch like this.
            batch: of samples.
            fixed: tensors that are read where they are.
        """
        if not self._may_be_recorded(name):
            return None
        return self._get(name, self._key(batch, (), fixed), partial(make, self._capture))

    def _stays(self, name: str, batch: Batch) -> bool:
        """Whether the batches for a part have always been in the same place."""
        place = tuple(t.data_ptr() for t in tensors_in((batch.inputs, batch.targets)))
        if self._places.setdefault(name, place) != place:
            self._places[name] = ()  # where none is
        return self._places[name] == place

    def _may_be_recorded(self, name: str) -> bool:
        return name not in self._impossible

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
                recorded = record(Aliased(self._network))
            except RuntimeError as problem:
                if is_out_of_memory(problem):
                    raise
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

    @property
    def known(self) -> "_Known":
        """What is known of the network, in the step under way or now."""
        return self._step or _Known.of(self._network)

    def _key(
        self, batch: Batch | None, given: tuple[Tensor, ...], fixed: tuple[Tensor, ...]
    ) -> Key:
        network, known = self._network, self.known
        samples = [] if batch is None else tensors_in((batch.inputs, batch.targets))
        copied = [*samples, *given]
        kind = network.parameters.device.type
        return (
            tuple((t.shape, t.dtype) for t in copied),
            tuple((t.data_ptr(), t.shape, t.stride()) for t in (*known.tensors(), *fixed)),
            # Of a step that is under way, and around everything else.
            network.autocast,
            network.scale,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            precisions(),
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of the network for a step: to look through all its modules takes a while.

    Attributes:
        parameters: all of them; what they hold may be replaced.
        modules: those with buffers, which a forward pass may replace.
    """

    parameters: list[nn.Parameter]
    modules: list[nn.Module]

    @classmethod
    def of(cls, network: Network) -> "_Known":
        """A model and a loss that nothing is known of yet."""
        roots = [m for m in (network.eager, network.loss.module) if isinstance(m, nn.Module)]
        modules = [m for root in roots for m in modules_in(root)]
        parameters = [p for m in modules for p in own_parameters(m)]
        return cls(parameters, [m for m in modules if own_buffers(m)])

    def tensors(self) -> Iterator[Tensor]:
        """All that a forward pass reads where it is."""
        yield from self.parameters
        for module in self.modules:
            yield from (buffer for _, buffer in own_buffers(module))
