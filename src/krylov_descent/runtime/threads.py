"""One thread of the CPU for a while, where waking the others takes longer than they save."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch's work on the calling thread alone.

    For small things between waits for a GPU: by then the other threads are asleep, and `eigh` of
    81 rows, which takes one thread 1.5 ms, took sixteen up to 140 ms. With all threads half of the
    steps took 8 to 25 ms longer, with one thread none did.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
