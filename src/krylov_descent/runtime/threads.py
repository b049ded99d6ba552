"""How optimisers in several threads share the switches that torch and Python have per process.

A step changes such switches temporarily:

- The precision of matrix products on CUDA, and CUDA graph capture, belong to one thread at a time:
  steps on CUDA take turns (`step_turn`).
- Each thread has its own number of torch threads. But a thread that first uses torch inherits the
  number that any thread set last, so no step begins while another thread is in `one_thread`.
- Switches that all threads set to the same value are `Shared`: the first thread to enter sets them,
  and the last one to leave restores them.

Two optimisers must not train the same model at once, because both would write its parameters.
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch

_cuda_turn = threading.RLock()
_thread_count = threading.RLock()


@contextmanager
def step_turn(device: torch.device) -> Iterator[None]:
    """Context manager around a step: one thread at a time on CUDA, any number of threads elsewhere.

    Ranks that are threads of one process would deadlock on CUDA. Give each rank its own process.

    Args:
        device: of the parameters.
    """
    with _thread_count:
        torch.get_num_threads()  # fixes the number for this thread
    with cuda_turn() if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def cuda_turn() -> Iterator[None]:
    """Re-entrant lock: no other thread is in a step on CUDA or in this context meanwhile.

    Do not enter it from a backward pass on CUDA. Autograd runs that pass in another thread, which
    would wait for the thread that waits for it.
    """
    with _cuda_turn:
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Context manager: torch computes on the calling thread alone; other threads keep their number.

    It is for small operations between waits for a GPU, when torch's worker threads are asleep. An
    `eigh` of 81 rows takes 1.5 ms on one thread and took up to 140 ms on sixteen. With all threads
    half of the steps took 8 to 25 ms longer; with one thread no step did.

    A thread of other code that first uses torch meanwhile also gets one thread, until it sets
    another number. Torch's own data loaders do this to such threads permanently.
    """
    with _thread_count:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class Shared(AbstractContextManager[None]):
    """A process-wide context that several threads may be in at once.

    The first thread to enter it enters the inner context, and the last thread to leave it leaves
    the inner context.

    Args:
        make: creates the inner context, each time the first thread enters.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._inside, self._held = make, 0, ExitStack()
        self._lock = threading.RLock()  # guards _inside and _held; held while entering and leaving

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._held.enter_context(self._make())
            self._inside += 1

    def __exit__(self, *problem: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._held.close()


@contextmanager
def _collector_disabled() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Pauses Python's cyclic garbage collector.
collector_paused = Shared(_collector_disabled)
