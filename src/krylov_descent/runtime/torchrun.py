"""Processes that `torchrun` starts, and restarts after a failure."""

import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.process_group import FIRST
from krylov_descent.runtime.ranks import RankError

T = TypeVar("T")


def under_torchrun() -> bool:
    """Whether `torchrun` started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


class Launch:
    """A call of `torchrun` and the processes that it started; without torchrun this process alone.

    Attributes:
        id: of the call, equal on all processes and after restarts; None without torchrun. It is
            kept in torchrun's store, because several calls may share torchrun's own id.
        leads: whether this is rank 0.
    """

    def __init__(self) -> None:
        self.id: str | None = None
        self._rank, self._size = FIRST, 1
        self._store: Any = None
        if under_torchrun():
            store, self._rank, self._size = next(rendezvous("env://"))
            prefixed: Any = vars(dist)["PrefixStore"]
            whole: Any = store
            while isinstance(whole, prefixed):  # torch 2.11 gives each attempt its own prefix
                whole = whole.underlying_store
            self.id = whole.compare_set("krylov-descent launch", "", uuid.uuid4().hex).decode()
            # In torch 2.13 a restarted process finds the addresses of dead processes in torchrun's
            # store and may try to reach them. So each attempt gets its own keys.
            attempt = f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
            self._store = prefixed(attempt, store)
        self.leads = self._rank == FIRST

    def of_first(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and return its result on all ranks; call once, before `joined`.

        Raises:
            RankError: `work` failed on rank 0. Rank 0 raises the error itself.
        """
        if self._store is None:
            return work()
        if not self.leads:
            problem, found = pickle.loads(self._store.get("of first"))
            if problem is not None:
                raise RankError(f"rank {FIRST} failed with {problem}")
            told: T = found
            return told
        try:
            done = work()
        except Exception as problem:
            message = f"{type(problem).__name__}: {first_line(problem)}"
            self._store.set("of first", pickle.dumps((message, None)))
            raise
        self._store.set("of first", pickle.dumps((None, done)))
        return done

    @contextmanager
    def joined(self, device: str) -> Iterator[None]:
        """Context manager: a member of torchrun's process group; does nothing without torchrun.

        Args:
            device: "cpu" for gloo; "cuda" for NCCL, where each process takes the GPU of its local
                rank.
        """
        if self._store is None:
            yield
            return
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "nccl" if device.startswith("cuda") else "gloo"
        dist.init_process_group(backend, store=self._store, rank=self._rank, world_size=self._size)
        try:
            yield
        finally:
            dist.destroy_process_group()
