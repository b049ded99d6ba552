"""Processes that can be killed, started in milliseconds by a server that has torch loaded."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
# The first optimiser of a process makes torch load its compiler, which takes seconds.
SERVER.set_forkserver_preload(["krylov_descent.cli.training", "torch._dynamo"])


def start(function: Callable[..., None], *arguments: Any) -> ForkServerProcess:
    """Call a function of a module in a process of its own, which ends with this one."""
    process = SERVER.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def start_ksd(
    *words: str, log: Path, before: Callable[[], None] | None = None
) -> ForkServerProcess:
    """The command, on one thread, with all that it prints added to a file.

    Args:
        words: after `ksd`.
        log: the file.
        before: called in the process first.
    """
    return start(_ksd, list(words), log, before)


def _ksd(words: list[str], log: Path, before: Callable[[], None] | None) -> None:
    import torch

    from krylov_descent.cli import main

    torch.set_num_threads(1)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if before is not None:
        before()
    try:
        main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
