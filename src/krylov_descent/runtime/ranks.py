"""More than one process: sums over ranks, the only room that knows there is more than one.

Under a process group of several ranks every rank has its own shard of the data, of any size, and
all run the same program. What they find is put together here:

    sums        numbers and vectors over all ranks (all-reduce; reduce-scatter where the basis is
                sharded)
    agreement   where a decision hangs on a number that each rank computed for itself, rank 0's
                counts (broadcast), so that no rank can leave a search by itself because its
                last bit is another one
    failures    a rank that fails in work between two sums puts NaN into its part of the next
                one, so all ranks end together at no extra traffic; only when the NaN is seen are
                messages exchanged. Of any other error in a step the others learn by a
                `failure_notice`

Every byte that is sent goes through `Ranks`, which counts it by phase and kind (`traffic`).
"""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from krylov_descent.runtime.failure_notice import Ending, Exchange, FailureNotice
from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.private import default_store

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Torch 2.13 has new names for these two.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)

# A mesh has one dimension; None is the group of all processes. A torch that was built without
# torch.distributed has neither class.
ProcessGroup: TypeAlias = "dist.ProcessGroup | DeviceMesh | None"

OutOfMemory = torch.OutOfMemoryError  # a RuntimeError, which is no failure of the network
FIRST = 0  # the rank whose number counts where ranks could differ
UNKNOWN = -1  # the length of a stream


class CommunicationError(RuntimeError):
    """Another rank died or did not answer in time; the message names the phase of the step."""


class RankError(RuntimeError):
    """The step ended on this rank because another one failed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Where this rank's samples lie among all: the shards follow one another in order of rank."""

    start: int
    size: int
    total: int

    def own(self, indices: Tensor) -> Tensor:
        """Of indices into all samples those of this rank, counted from its first, in their order.

        Args:
            indices: [m], any order.
        """
        if self.size == self.total:
            return indices
        here = (indices >= self.start) & (indices < self.start + self.size)
        return indices[here] - self.start


@dataclass(slots=True)
class Sent:
    """What one kind of exchange came to in one phase, as this rank handed it over."""

    calls: int = 0
    bytes: int = 0


class Ranks:
    """The processes that train together; one by itself where there is no process group.

    Args:
        device: where tensors are exchanged: that of the parameters.
        process_group: whose ranks train together: a ProcessGroup or a DeviceMesh of one dimension;
            all processes by default.

    Attributes:
        rank: of this process within the group.
        size: of the group.
        together: whether there are others. A group of one rank is no group: nothing is sent.
        traffic: what was sent, by (phase, kind of exchange). The bytes are those of the tensor
            that is summed, broadcast or gathered, whatever the backend makes of it on the wire.
    """

    def __init__(self, device: torch.device, process_group: ProcessGroup = None) -> None:
        self.device = device
        self._group = None if process_group is None else _checked_group(process_group)
        self.rank, self.size = _place_in(self._group)
        self.together = self.size > 1
        # torch counts the source of a broadcast among all processes.
        self._first = dist.get_global_rank(self._group, FIRST) if self._group else FIRST
        self.traffic: dict[tuple[str, str], Sent] = {}
        self._phase = "start"
        self._failure: Exception | None = None
        self._notice: FailureNotice | None = None  # in a step
        self._settled = False
        self._told = False  # whether the others know of the failure for which this rank ends

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        memo[id(self._group)] = self._group  # a copy belongs to the same group
        twin = object.__new__(Ranks)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            raise TypeError(
                "an optimiser with a `process_group` cannot be pickled, as the group exists in "
                "this process only: save its state_dict()"
            )
        return vars(self)

    @property
    def leads(self) -> bool:
        """Whether what is to be counted once is counted by this rank."""
        return self.rank == FIRST

    # The start, and what lies where -----------------------------------------------------------

    def check_group(self, who: str) -> None:
        """Refuse a process group that came, went or changed after the optimiser was made."""
        try:
            rank, size = _place_in(self._group)
        except ValueError:  # torch does not know the group any more
            rank, size = FIRST, 1
        if (rank, size) == (self.rank, self.size):
            return
        if not self.together:
            raise RuntimeError(
                f"a process group was initialised after {who} was made, so it would train on this "
                "rank's data alone: call torch.distributed.init_process_group first, then make "
                f"{who}"
            )
        if size == 1:
            raise RuntimeError(
                f"the process group under which {who} was made is gone: make {who} anew to go on "
                "in one process, or in another group"
            )
        raise RuntimeError(
            f"{who} was made on rank {self.rank} of {self.size}, and the process group of now has "
            f"this process as rank {rank} of {size}: make {who} anew, and load its state_dict"
        )

    def shard(self, size: int) -> Shard:
        """Where the samples of this rank lie among those of all; one number from each rank."""
        sizes = self._gather_sizes(size)
        return Shard(sum(sizes[: self.rank]), size, sum(sizes))

    def shard_if_known(self, size: int | None) -> Shard | None:
        """The same; None, on all ranks, where a rank does not know its number of samples yet."""
        sizes = self._gather_sizes(UNKNOWN if size is None else size)
        if UNKNOWN in sizes or size is None:
            return None
        return Shard(sum(sizes[: self.rank]), size, sum(sizes))

    def _gather_sizes(self, size: int) -> list[int]:
        return [own for (own,) in self.gather_integers([size])]

    def gather_integers(self, own: list[int]) -> list[list[int]]:
        """As many from every rank, in order of rank."""
        if not self.together:
            return [own]
        numbers = torch.tensor(own, dtype=torch.int64, device=self.device)
        rows: list[list[int]] = self._all_gather(numbers).tolist()
        return rows

    def gather_numbers(self, own: Tensor) -> list[Tensor]:
        """Numbers of any count from every rank, in order of rank."""
        if not self.together:
            return [own]
        sizes = self._gather_sizes(own.numel())
        padded = own.new_zeros(max(sizes)).to(self.device)
        padded[: own.numel()] = own
        found = self._all_gather(padded)
        return [row[:size].to(own.device) for row, size in zip(found, sizes, strict=True)]

    def _all_gather(self, own: Tensor) -> Tensor:
        """As many numbers [m] from every rank, [R, m]."""
        whole = own.new_empty(self.size * own.numel())
        with self._exchange("all-gather", whole.nbytes, own):
            _all_gather_single(whole, own, group=self._group)
        return whole.reshape(self.size, own.numel())

    # Sums -----------------------------------------------------------------------------------

    def sum_numbers(self, own: Tensor) -> Tensor:
        """A few numbers [m] (float64, CPU), summed over ranks.

        Raises:
            RankError: a rank failed before it. The rank itself raises what it failed of.
        """
        if not self.together:
            return own
        total = torch.full_like(own, torch.nan) if self._failure else own
        total = self._all_reduce(total.to(self.device, copy=True)).to(own.device)
        if bool(total.isnan().any()):
            self.end_together()
        return total

    def sum_vector(self, own: Tensor) -> Tensor:
        """A vector [n], summed over ranks in place; NaN everywhere if a rank failed before it."""
        if not self.together:
            return own
        if self._failure:
            own.fill_(torch.nan)
        return self._all_reduce(own)

    def agreed(self, tensor: Tensor) -> Tensor:
        """Rank 0's, in place of what this rank computed for itself, however little they differ."""
        if not self.together:
            return tensor
        with self._exchange("broadcast", tensor.nbytes, tensor):
            dist.broadcast(tensor, self._first, group=self._group)
        return tensor

    def share(self, thing: Any) -> Any:
        """Rank 0's, of anything that can be pickled; what the others give does not matter."""
        if not self.together:
            return thing
        found = [thing]
        with self._exchange("messages", 0, torch.empty(0)):
            dist.broadcast_object_list(found, self._first, group=self._group)
        return found[0]

    def agreed_number(self, number: float) -> float:
        """Rank 0's number."""
        if not self.together:
            return number
        return float(self.agreed(torch.tensor(number, dtype=torch.float64, device=self.device)))

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        with self._exchange("all-reduce", tensor.nbytes, tensor):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    # Vectors in slices, one to a rank ---------------------------------------------------------

    def slice_of(self, size: int) -> slice:
        """The part of a vector [size] that this rank holds, where each holds an equal part."""
        width = -(-size // self.size)
        return slice(min(self.rank * width, size), min((self.rank + 1) * width, size))

    def gather_slices(self, own: Tensor, size: int) -> Tensor:
        """The whole vector [size] out of every rank's slice."""
        if not self.together:
            return own
        return self._all_gather(_padded(own, -(-size // self.size))).reshape(-1)[:size]

    def sum_to_slices(self, own: Tensor) -> Tensor:
        """This rank's slice of the sum over ranks of vectors [n]; NaN if a rank failed."""
        if not self.together:
            return own
        if self._failure:
            own.fill_(torch.nan)
        size, part = own.numel(), self.slice_of(own.numel())
        width = -(-size // self.size)
        total = own.new_empty(width)
        with self._exchange("reduce-scatter", width * self.size * own.element_size(), own):
            _reduce_scatter_single(total, _padded(own, width * self.size), group=self._group)
        return total[: part.stop - part.start]

    # Failures -------------------------------------------------------------------------------

    def own_work(self) -> "_OwnWork":
        """Work of this rank alone: what fails in it makes the next sum NaN, and all ranks end.

        By itself a process raises at once.
        """
        return _OwnWork(self)

    def fail(self, problem: Exception) -> None:
        """Let the next sum be NaN. The first failure is the cause, and only it is told."""
        self._failure = self._failure or problem

    @property
    def failed(self) -> bool:
        """Whether this rank failed and the others do not know yet."""
        return self._failure is not None

    def end_together(self) -> None:
        """Exchange what went wrong, and raise it on every rank; nothing happens if nothing did."""
        if not self.together:
            return
        own = self._failure
        messages = self.gather_objects(None if own is None else _message(own))
        failures = {rank: told for rank, told in enumerate(messages) if told is not None}
        if failures:
            self._end(failures)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A step of an optimiser: an error in it, wherever it comes from, ends the step on all.

        The rank that failed raises its own error, the others a RankError at the exchange in which
        they wait for that rank, or before the next one.

        Args:
            number: the same on all ranks, and another one for each step.

        Cost: a thread that looks into the process group's store twenty times a second.
        """
        self._told = False
        store = default_store() if self.size > 1 else None
        if store is not None:
            store = dist.distributed_c10d.PrefixStore(f"krylov_descent/{number}", store)
            self._notice = FailureNotice(store, self.rank, self.size)
        try:
            yield
        except (RankError, CommunicationError):
            raise
        except Exception as problem:
            cause = self._failure or problem
            self._tell(cause)
            if cause is problem:
                raise
            raise cause from problem
        finally:
            if self._notice is not None:
                self._notice.close()
            self._notice, self._failure, self._settled = None, None, False

    def settle(self) -> None:
        """The last exchange of a step: no rank has failed in it, or all raise. One number.

        What changes parameters and state for good comes after it, and must not fail. A second call
        in the same step does nothing.
        """
        if not self.together or self._settled:
            return
        failed = torch.nan if self._failure else 0.0
        total = self._all_reduce(torch.tensor(failed, dtype=torch.float64, device=self.device))
        self._settled = True  # whatever happens to this rank from here on: the others are done
        if math.isnan(total):
            self._settled = False
            self.end_together()

    def _tell(self, problem: Exception) -> None:
        """Let the other ranks know of an error that they have not seen in a sum."""
        notice, self._notice = self._notice, None
        if notice is None or self._settled or self._told:
            return
        # Where the store is gone, or a rank, the others find out by the group's timeout.
        with suppress(Exception):
            for exchange in notice.tell(_message(problem)):
                self._take_part(exchange)

    def _take_part(self, exchange: Exchange) -> None:
        """So that the others can leave an exchange."""
        own = torch.zeros(
            exchange.numbers, dtype=getattr(torch, exchange.dtype), device=self.device
        )
        if own.is_floating_point():
            own.fill_(torch.nan)
        {
            "all-gather": self._all_gather,
            "all-reduce": self._all_reduce,
            "broadcast": self.agreed,
            "reduce-scatter": self.sum_to_slices,
        }[exchange.kind](own)

    def _end_if_told(self, asked: Callable[[], Ending | None]) -> None:
        try:
            ending = asked()
        except TimeoutError as problem:
            raise CommunicationError(f"rank {self.rank} of {self.size}: {problem}") from problem
        if ending is not None:
            self._end(ending.failures)

    def _end(self, failures: dict[int, str]) -> None:
        """Raise what this rank failed of itself, or else what the others did."""
        own, self._failure = self._failure, None
        if own is not None:
            self._told = True
            raise own
        told = "; ".join(f"rank {rank} failed with {why}" for rank, why in failures.items())
        raise RankError(
            f"the step ended in phase {self._phase!r} with the parameters as before: {told}"
        )

    # Phases, errors, bytes ------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give what is exchanged a name, for the traffic and for errors."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def enter(self, phase: str) -> None:
        """The same for all that follows."""
        self._phase = phase

    def gather_objects(self, own: Any) -> list[Any]:
        """Anything that can be pickled, from every rank, in order of rank."""
        written = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        return [pickle.loads(bytes(row.tolist())) for row in self.gather_numbers(written)]

    @contextmanager
    def _exchange(self, kind: str, size: int, own: Tensor) -> Iterator[None]:
        """Count what is sent, and end the step where another rank has failed.

        Args:
            kind: of exchange.
            size: in bytes, for the traffic.
            own: what this rank hands over.
        """
        notice = self._notice
        if notice is not None:
            exchange = Exchange(kind, own.numel(), str(own.dtype).removeprefix("torch."))
            self._end_if_told(lambda: notice.enter(exchange))
        sent = self.traffic.setdefault((self._phase, kind), Sent())
        sent.calls += 1
        sent.bytes += size
        try:
            yield
        except Exception as problem:
            if not isinstance(problem, RuntimeError) or isinstance(problem, OutOfMemory):
                if notice is not None:
                    notice.withdraw()
                raise
            raise CommunicationError(
                f"rank {self.rank} of {self.size}: the {kind} in phase {self._phase!r} failed "
                f"({first_line(problem)}): another rank died, or took longer than the timeout of "
                "the process group"
            ) from problem
        if notice is not None:
            self._end_if_told(notice.leave)


class _OwnWork:
    """A context that keeps failures for the next sum over ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> bool:
        # What another rank failed of is no failure of this one.
        foreign = isinstance(problem, RankError | CommunicationError)
        if not self._ranks.together or foreign or not isinstance(problem, Exception):
            return False
        self._ranks.fail(problem)
        return True


def _place_in(group: Any) -> tuple[int, int]:
    """(rank, size) of this process in a group, None for that of all processes.

    Raises:
        ValueError: the group was destroyed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return FIRST, 1
    return dist.get_rank(group), dist.get_world_size(group)


def _checked_group(given: Any) -> Any:
    """The process group out of what a user gave as `process_group`."""
    if isinstance(given, vars(dist)["DeviceMesh"]):
        if given.ndim != 1:
            raise ValueError(
                f"`process_group` is a DeviceMesh of {given.ndim} dimensions: give the one along "
                "which the data are divided, mesh[name]"
            )
        given = given.get_group()
    if given == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"this process, rank {dist.get_rank()}, is not in `process_group`: make the optimiser "
            "on the ranks of the group only, or give each rank a group that it is in"
        )
    if not isinstance(given, dist.ProcessGroup):
        raise TypeError(
            "`process_group` must be a torch.distributed.ProcessGroup, a DeviceMesh of one "
            f"dimension or None, found {type(given).__name__}"
        )
    return given


def _message(problem: Exception) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"


def _padded(vector: Tensor, size: int) -> Tensor:
    if vector.numel() == size:
        return vector.contiguous()
    padded = vector.new_zeros(size)
    padded[: vector.numel()] = vector
    return padded
