"""Real processes that train together over gloo, started once and given one piece of work after
the other."""

import multiprocessing.connection
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

TIMEOUT = timedelta(seconds=20)
PATIENCE = 60.0  # seconds until a test gives up on an answer
Work = Callable[..., Any]


class Group:
    """Ranks that wait for work: a function of a module, called on each of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        pipes = [SERVER.Pipe() for _ in range(size)]
        self._ends: list[Connection] = [own for own, _ in pipes]
        self.processes = [
            start(_serve, rank, size, store, theirs) for rank, (_, theirs) in enumerate(pipes)
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
        """The same, with (False, traceback) for a rank that failed and (False, "") for a dead one."""
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


def _serve(rank: int, size: int, store: str, end: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=TIMEOUT
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
