"""Kernels on a GPU that need not wait for all that was launched before them."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def now(device: torch.device) -> torch.cuda.Event | None:
    """The moment until which kernels were launched; None where that makes no difference."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@contextmanager
def beside_what_follows(moment: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """For a while kernels wait for those launched before a moment alone, not for what followed it.

    All that is launched afterwards waits for them. So nothing that they read may be written to by
    what followed the moment; and no memory that is let go meanwhile is used again too early.
    """
    if moment is None:
        yield
        return
    current, own = torch.cuda.current_stream(device), _stream_beside(device)
    own.wait_event(moment)
    try:
        with torch.cuda.stream(own):
            yield
    finally:
        current.wait_stream(own)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    """One that goes first, where others fill a GPU, and is none of those that are recorded on."""
    return torch.cuda.Stream(device, priority=-1)
