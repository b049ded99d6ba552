"""How optimisers in several threads keep out of each other's way.

Torch and Python have switches for the whole process, which a step changes for a while:

- The precision of CUDA's matrix products, and all that is recorded on a GPU, belong to one thread
  at a time: steps on CUDA take turns (`step_turn`).
- The number of torch's threads is each thread's own, but a thread that first uses torch takes over
  what was set last anywhere. So no step begins while another thread has `one_thread`.
- Switches that all threads set to the same value are `Shared`: the first thread sets them, and the
  last one puts them back.

Two optimisers for one model are not meant to run at once: both would write its parameters.
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
    """Around a whole step: on CUDA one thread at a time, elsewhere any number of threads at once.

    Ranks that are threads of one process would wait for each other forever on CUDA: give each rank
    a process.

    Args:
        device: of the parameters.
    """
    with _thread_count:
        torch.get_num_threads()  # from now on this thread has a number of its own
    with cuda_turn() if device.type == "cuda" else nullcontext():
        yield


@contextmanager
def cuda_turn() -> Iterator[None]:
    """For a while no other thread is in a step on CUDA, or here; a thread may enter repeatedly.

    Not to be called in a backward pass on CUDA: that has a thread of its own, which would wait for
    the thread that waits for it.
    """
    with _cuda_turn:
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's work on the calling thread alone; other threads have as many threads as before.

    For small things between waits for a GPU: by then the other threads are asleep, and `eigh` of
    81 rows, which takes one thread 1.5 ms, took sixteen up to 140 ms. With all threads half of the
    steps took 8 to 25 ms longer, with one thread none did.

    Threads of other code that first use torch meanwhile have one thread, too, until they set
    another number. Torch's own data loaders do the same to them, for good.
    """
    with _thread_count:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)


class Shared(AbstractContextManager[None]):
    """A context of the whole process in which several threads may be at once.

    The first thread that enters enters it, the last one that leaves leaves it. So what it changes
    is changed for as long as any thread needs it, and is then as before.

    Args:
        make: makes the context, each time that nobody is in it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._inside, self._held = make, 0, ExitStack()
        self._lock = threading.RLock()  # of the two before; held to enter and to leave

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


# For a while Python does not look for objects that only refer to each other.
collector_paused = Shared(_collector_disabled)
