"""Real processes that train together over gloo, and are given one piece of work after another."""

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import SERVER, start

PATIENCE = 60.0  # seconds until a test gives up on an answer
Work = Callable[..., Any]


class Group:
    """Ranks that wait for work: a function of a module, called on each of them."""

    def __init__(self, size: int, timeout: float = 30.0) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [SERVER.Pipe() for _ in range(size)]
        self._ends: list[Connection] = [own for own, _ in pipes]
        self.processes = [
            start(_serve, rank, size, store, timeout, theirs)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for _, theirs in pipes:
            theirs.close()

    def run(self, work: Work, *arguments: Any) -> list[Any]:
        """What the work returned on each rank; fails with the traceback of a rank that failed."""
        answers = self.try_to_run(work, *arguments)
        for rank, (good, answer) in enumerate(answers):
            assert good, f"rank {rank}:\n{answer}"
        return [answer for _, answer in answers]

    def try_to_run(self, work: Work, *arguments: Any) -> list[tuple[bool, Any]]:
        """The same as (True, answer); (False, traceback) where it failed, "" of a dead rank."""
        for end in self._ends:
            end.send((work, arguments))
        return [self._answer(end) for end in self._ends]

    def _answer(self, end: Connection) -> tuple[bool, Any]:
        assert end.poll(PATIENCE), "no answer: a rank hangs"
        try:
            found: tuple[bool, Any] = end.recv()
        except EOFError:
            return False, ""
        return found

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, timeout: float, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            work, arguments = end.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            end.send((True, work(*arguments)))
        except Exception:
            end.send((False, traceback.format_exc()))
