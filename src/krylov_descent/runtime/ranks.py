"""Several processes that train together: their collectives, agreement and failures.

In a process group of several ranks all ranks run the same program, and each rank has its own shard
of the data, of any size. `Ranks` combines their results:

- Sums: numbers and vectors are summed over ranks by all-reduce, or by reduce-scatter where the
  basis is sharded.
- Agreement: where each rank computes a number for itself and a decision depends on it, rank 0's
  number is broadcast. Otherwise a difference in the last bit could let one rank leave a search
  alone.
- Failures: a rank that fails between two sums contributes NaN to the next sum, so that all ranks
  end together without extra traffic. Error messages are exchanged only after the NaN is seen. Other
  errors in a step reach the other ranks through `failure_notice`.

All traffic goes through `Ranks`, which counts bytes by phase and collective (`traffic`).
"""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from krylov_descent.runtime.failure_notice import Ending, Exchange, FailureNotice
from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.private import default_store
from krylov_descent.runtime.process_group import FIRST, ProcessGroup, checked_group, place_in

# Torch 2.13 renamed these two functions.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)

OutOfMemory = torch.OutOfMemoryError  # a RuntimeError that is no failure of the network
UNKNOWN = -1  # stands for the unknown length of a stream


class CommunicationError(RuntimeError):
    """Another rank died or timed out; the message names the phase of the step."""


class RankError(RuntimeError):
    """The step ended on this rank because another rank failed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of this rank's samples among all samples, which are ordered by rank.

    Attributes:
        start: the index of this rank's first sample.
        size: the number of this rank's samples.
        total: the number of samples on all ranks.
    """

    start: int
    size: int
    total: int

    def own(self, indices: Tensor) -> Tensor:
        """This rank's local indices from global indices, in the given order; others are dropped.

        Args:
            indices: [m], in any order.
        """
        if self.size == self.total:
            return indices
        here = (indices >= self.start) & (indices < self.start + self.size)
        return indices[here] - self.start


@dataclass(slots=True)
class Sent:
    """Calls and bytes of one kind of collective in one phase, as this rank contributed them."""

    calls: int = 0
    bytes: int = 0


class Ranks:
    """The processes that train together, or a single process if there is no process group.

    Args:
        device: on which tensors are exchanged: the device of the parameters.
        process_group: the ranks that train together: a ProcessGroup or a one-dimensional
            DeviceMesh; all processes by default.

    Attributes:
        rank: of this process within the group.
        size: of the group.
        together: whether the group has more than one rank. A group of one rank sends nothing.
        traffic: calls and bytes by (phase, kind of collective). The bytes are those of the tensor
            that is summed, broadcast or gathered, not those that the backend sends.
    """

    def __init__(self, device: torch.device, process_group: ProcessGroup = None) -> None:
        self.device = device
        self._group = None if process_group is None else checked_group(process_group)
        self.rank, self.size = place_in(self._group)
        self.together = self.size > 1
        # The global rank, which torch expects as the source of a broadcast.
        self._first = dist.get_global_rank(self._group, FIRST) if self._group else FIRST
        self.traffic: dict[tuple[str, str], Sent] = {}
        self._phase = "start"
        self._failure: Exception | None = None
        self._notice: FailureNotice | None = None  # set during a step
        self._settled = False
        self._told = False  # whether the other ranks know why this rank ends the step

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranks":
        memo[id(self._group)] = self._group  # shared with the copy
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
        """Whether this is rank 0, which contributes terms that must be counted once."""
        return self.rank == FIRST

    # Start, and shards of the data --------------------------------------------------------------

    def check_group(self, who: str) -> None:
        """Raise RuntimeError if the process group changed after the optimiser `who` was made."""
        try:
            rank, size = place_in(self._group)
        except ValueError:  # the group was destroyed
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
        """The place of this rank's samples among all; gathers one number from each rank."""
        sizes = self._gather_sizes(size)
        return Shard(sum(sizes[: self.rank]), size, sum(sizes))

    def shard_if_known(self, size: int | None) -> Shard | None:
        """Like `shard`, but None on all ranks if any rank does not know its number of samples."""
        sizes = self._gather_sizes(UNKNOWN if size is None else size)
        if UNKNOWN in sizes or size is None:
            return None
        return Shard(sum(sizes[: self.rank]), size, sum(sizes))

    def _gather_sizes(self, size: int) -> list[int]:
        return [own for (own,) in self.gather_integers([size])]

    def gather_integers(self, own: list[int]) -> list[list[int]]:
        """Integers from every rank, the same count each, in order of rank."""
        if not self.together:
            return [own]
        numbers = torch.tensor(own, dtype=torch.int64, device=self.device)
        rows: list[list[int]] = self._all_gather(numbers).tolist()
        return rows

    def gather_numbers(self, own: Tensor) -> list[Tensor]:
        """A 1-D tensor from every rank, of any length, in order of rank."""
        if not self.together:
            return [own]
        sizes = self._gather_sizes(own.numel())
        padded = own.new_zeros(max(sizes)).to(self.device)
        padded[: own.numel()] = own
        found = self._all_gather(padded)
        return [row[:size].to(own.device) for row, size in zip(found, sizes, strict=True)]

    def _all_gather(self, own: Tensor) -> Tensor:
        """Gather a tensor [m] from every rank into [R, m]."""
        whole = own.new_empty(self.size * own.numel())
        with self._exchange("all-gather", whole.nbytes, own):
            _all_gather_single(whole, own, group=self._group)
        return whole.reshape(self.size, own.numel())

    # Sums -----------------------------------------------------------------------------------

    def sum_numbers(self, own: Tensor) -> Tensor:
        """Sum a few numbers [m] (float64, on the CPU) over ranks.

        Raises:
            RankError: another rank failed before the sum. The failed rank raises its own error.
        """
        if not self.together:
            return own
        total = torch.full_like(own, torch.nan) if self._failure else own
        total = self._all_reduce(total.to(self.device, copy=True)).to(own.device)
        if bool(total.isnan().any()):
            self.end_together()
        return total

    def sum_vector(self, own: Tensor) -> Tensor:
        """Sum a vector [n] over ranks, in place; NaN everywhere if a rank failed before the sum."""
        if not self.together:
            return own
        if self._failure:
            own.fill_(torch.nan)
        return self._all_reduce(own)

    def agreed(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with rank 0's, so that all ranks continue with equal bits."""
        if not self.together:
            return tensor
        with self._exchange("broadcast", tensor.nbytes, tensor):
            dist.broadcast(tensor, self._first, group=self._group)
        return tensor

    def share(self, thing: Any) -> Any:
        """Rank 0's picklable object, on all ranks; the other ranks' arguments are ignored."""
        if not self.together:
            return thing
        found = [thing]
        with self._exchange("messages", 0, torch.empty(0)):
            dist.broadcast_object_list(found, self._first, group=self._group)
        return found[0]

    def agreed_number(self, number: float) -> float:
        """Rank 0's number, on all ranks."""
        if not self.together:
            return number
        return float(self.agreed(torch.tensor(number, dtype=torch.float64, device=self.device)))

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        with self._exchange("all-reduce", tensor.nbytes, tensor):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    # Vectors in slices, one per rank ----------------------------------------------------------

    def slice_of(self, size: int) -> slice:
        """The slice of a vector [size] that this rank holds: ⌈size / R⌉ entries or fewer."""
        width = -(-size // self.size)
        return slice(min(self.rank * width, size), min((self.rank + 1) * width, size))

    def gather_slices(self, own: Tensor, size: int) -> Tensor:
        """The whole vector [size] from the slices of all ranks."""
        if not self.together:
            return own
        return self._all_gather(_padded(own, -(-size // self.size))).reshape(-1)[:size]

    def sum_to_slices(self, own: Tensor) -> Tensor:
        """This rank's slice of the sum of vectors [n] over ranks; NaN if a rank failed."""
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
        """Context manager for local work: an error makes the next sum NaN, which ends all ranks.

        A single process raises the error at once.
        """
        return _OwnWork(self)

    def fail(self, problem: Exception) -> None:
        """Note a failure, which makes the next sum NaN. Only the first failure is kept."""
        self._failure = self._failure or problem

    @property
    def failed(self) -> bool:
        """Whether this rank has failed and the other ranks do not know yet."""
        return self._failure is not None

    def end_together(self) -> None:
        """Exchange failures and raise on every rank; does nothing if no rank failed."""
        if not self.together:
            return
        own = self._failure
        messages = self.gather_objects(None if own is None else _message(own))
        failures = {rank: told for rank, told in enumerate(messages) if told is not None}
        if failures:
            self._end(failures)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager around a step: an error on one rank ends the step on all ranks.

        The failed rank raises its own error. The other ranks raise RankError at the collective in
        which they wait for the failed rank, or before their next collective.

        Args:
            number: identifies the step: equal on all ranks, and different for each step.

        Cost: a thread that polls the process group's store twenty times a second.
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
        """The last collective of a step, with one number: all ranks raise if any rank has failed.

        Permanent changes of parameters and state come after it and must not fail. A second call in
        the same step does nothing.
        """
        if not self.together or self._settled:
            return
        failed = torch.nan if self._failure else 0.0
        total = self._all_reduce(torch.tensor(failed, dtype=torch.float64, device=self.device))
        self._settled = True  # an error of this rank no longer concerns the others
        if math.isnan(total):
            self._settled = False
            self.end_together()

    def _tell(self, problem: Exception) -> None:
        """Report an error to the other ranks, unless they have seen it in a sum."""
        notice, self._notice = self._notice, None
        if notice is None or self._settled or self._told:
            return
        # If the store or a rank is gone, the other ranks end by the group's timeout.
        with suppress(Exception):
            for exchange in notice.tell(_message(problem)):
                self._take_part(exchange)

    def _take_part(self, exchange: Exchange) -> None:
        """Join a collective with NaN or zeros, so that the other ranks can leave it."""
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
        """Raise this rank's own failure, or else a RankError with the failures of other ranks."""
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
        """Context manager that names the phase, for `traffic` and for error messages."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def enter(self, phase: str) -> None:
        """Set the name of the phase until the next `enter`."""
        self._phase = phase

    @property
    def current_phase(self) -> str:
        """The name of the phase; empty before the first."""
        return self._phase

    def gather_objects(self, own: Any) -> list[Any]:
        """A picklable object from every rank, in order of rank."""
        written = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        return [pickle.loads(bytes(row.tolist())) for row in self.gather_numbers(written)]

    @contextmanager
    def _exchange(self, kind: str, size: int, own: Tensor) -> Iterator[None]:
        """Context manager around a collective: counts bytes, ends the step if a rank failed.

        Args:
            kind: of collective.
            size: in bytes, for `traffic`.
            own: the tensor that this rank contributes.
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
    """Context manager that keeps an error for the next sum over ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> bool:
        # An error that reports another rank's failure is no failure of this rank.
        foreign = isinstance(problem, RankError | CommunicationError)
        if not self._ranks.together or foreign or not isinstance(problem, Exception):
            return False
        self._ranks.fail(problem)
        return True


def _message(problem: Exception) -> str:
    return f"{type(problem).__name__}: {first_line(problem)}"


def _padded(vector: Tensor, size: int) -> Tensor:
    if vector.numel() == size:
        return vector.contiguous()
    padded = vector.new_zeros(size)
    padded[: vector.numel()] = vector
    return padded
