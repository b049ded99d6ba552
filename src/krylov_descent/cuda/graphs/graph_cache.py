"""Cache of the recordings of a network; each replays the kernels of a part of a step by one launch.

On a GPU the step of a small net is bound by the host, which launches some hundred small kernels for
each product and each evaluation. These kernels read the parameters in place and a batch of a fixed
size, so they are recorded at an early step (see `capture`) and replayed afterwards. The results
agree to rounding.

A recording is valid for the shapes, addresses and flags it was recorded with, which are compared
before each use. `staleness` detects other changes. Parts that cannot be recorded run eagerly, with
one warning.
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
from krylov_descent.cuda.graphs.basis_room import BasisRoom
from krylov_descent.cuda.graphs.capture import Capture, Part, Recording
from krylov_descent.curvature.kept_jacobian import NoJacobianError
from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import first_line, is_out_of_memory
from krylov_descent.runtime.precision import precisions
from krylov_descent.runtime.private import modules_in, own_buffers, own_parameters

Recorded = TypeVar("Recorded")
Key = tuple[Any, ...]


class GraphCache:
    """The recordings of a network, by name.

    The cache key of a recording holds the addresses, shapes and strides of the tensors that its
    graph reads. Tensors may be freed: a new tensor has another address, or is read at the old one.

    Args:
        network: its parameters are read in place.
        capture: makes the graphs.

    Attributes:
        loaded_is_new: whether the last `load` made its recording, rather than finding it cached.
    """

    def __init__(self, network: Network, capture: Capture) -> None:
        self._network, self._capture = network, capture
        self._held: dict[str, tuple[Key, Any]] = {}
        self._asked: dict[str, Key] = {}
        self._impossible: set[str] = set()
        self._places: dict[str, tuple[int, ...]] = {}
        self._room: BasisRoom | None = None
        self._step: _Known | None = None
        self.loaded_is_new = False

    def __getstate__(self) -> dict[str, Any]:
        # The parameters of a copied model have other addresses, so it needs its own recordings.
        nothing: dict[str, Any] = {"_held": {}, "_asked": {}, "_places": {}}
        return vars(self) | nothing | {"_room": None, "_step": None}

    def clear(self) -> None:
        """Drop all recordings and the memory of the basis: the model has changed."""
        self.forget()
        self._room = None

    def forget(self) -> None:
        """Drop all recordings; the memory of the basis stays allocated."""
        self._held, self._asked, self._impossible = {}, {}, set()

    def room(self, rows: int, places: int, like: Tensor) -> BasisRoom:
        """Memory for vectors like a given one [n], the same as long as they fit.

        Args:
            rows: the number of vectors.
            places: for how many vectors to make room, if that must be made.
            like: a vector [n].
        """
        if self._room is None or not self._room.suits(rows, places, like):
            self._room = None  # free it first
            self._room = BasisRoom.empty(max(rows, places), like)
        return self._room

    def release(self, *, but: Collection[str]) -> None:
        """Drop all recordings, with their memory, but for the names in `but`."""
        self._held = {name: held for name, held in self._held.items() if name in but}
        self._asked = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context of a step: modules do not change within it, so they are listed only once."""
        self._step = _Known.of(self._network)
        try:
            yield
        finally:
            self._step = None

    @property
    def names(self) -> list[str]:
        """The names of all recordings."""
        return list(self._held)

    def has(self, name: str) -> bool:
        """Whether there is a recording of this name, for a batch of any shape."""
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
        """The recording of `part(network, batch, *given)`; None if it cannot be recorded.

        Args:
            name: name of the part.
            part: the function to record, unless it is cached.
            batch: samples, copied to the recording's own batch.
            given: other tensors, copied likewise.
            fixed: tensors that the part reads in place.
            numbers: host numbers that the part reads; part of the cache key.
            rehearsal: a shorter function with the same kinds of kernels, run as warm-up before the
                recording in place of a part that takes long.
            held: makes the state of the part; see `Recording`.
            foreign: see `Recording`.
            when_repeated: record only at the second request in a row for a batch of this shape.
            where_it_is: read the batch in place as long as its address never changes, which saves
                copying a large batch at every call.
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
        """The recording of a part that reads another recording's tensors; None if impossible.

        Args:
            other: the other recording, which is loaded before each use.
            name: name of the part.
            part: the function to record, unless it is cached; has the arguments of `other`'s part.
            fixed: further tensors that the part reads in place.
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
        """An object that holds several recordings; None if it cannot be recorded.

        Args:
            name: name of the object.
            make: makes the object, unless it is cached for a batch of this shape.
            batch: samples.
            fixed: tensors that the object reads in place.

        Raises:
            NoJacobianError: `make` wanted J, whose rows cannot be had. The name may still be
                recorded, because the caller goes on without J.
        """
        if not self._may_be_recorded(name):
            return None
        return self._get(name, self._key(batch, (), fixed), partial(make, self._capture))

    def _stays(self, name: str, batch: Batch) -> bool:
        """Whether the batches of a part have always had the same addresses."""
        place = tuple(t.data_ptr() for t in tensors_in((batch.inputs, batch.targets)))
        if self._places.setdefault(name, place) != place:
            self._places[name] = ()  # matches no batch
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
            sizes = key[0]  # shapes without addresses
            asked, self._asked[name] = self._asked.get(name), sizes
            if when_repeated and asked != sizes:
                return None
            try:
                recorded = record(Aliased(self._network))
            except NoJacobianError:  # see `made`
                raise
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
        """The tensors of the network, as listed at the beginning of the step or now."""
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
            network.autocast,
            network.scale,
            torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            precisions(),
        )


@dataclass(frozen=True, slots=True)
class _Known:
    """The tensors of a network, listed once per step because walking the modules is slow.

    Attributes:
        parameters: all parameters; their data may be replaced.
        modules: all modules with buffers, which a forward pass may replace.
    """

    parameters: list[nn.Parameter]
    modules: list[nn.Module]

    @classmethod
    def of(cls, network: Network) -> "_Known":
        """List the tensors of the model and of the loss."""
        roots = [m for m in (network.eager, network.loss.module) if isinstance(m, nn.Module)]
        modules = [m for root in roots for m in modules_in(root)]
        parameters = [p for m in modules for p in own_parameters(m)]
        return cls(parameters, [m for m in modules if own_buffers(m)])

    def tensors(self) -> Iterator[Tensor]:
        """All parameters and buffers, which a forward pass reads in place."""
        yield from self.parameters
        for module in self.modules:
            yield from (buffer for _, buffer in own_buffers(module))
