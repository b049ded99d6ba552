"""Processes that `torchrun` started: joining them, and knowing that they were started anew."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


def under_torchrun() -> bool:
    """Whether this process is one that `torchrun` started."""
    return dist.is_available() and dist.is_torchelastic_launched()


def restarted_by_torchrun() -> bool:
    """Whether `torchrun` has started the processes anew, after one of them had ended."""
    return under_torchrun() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """As a member of the process group that `torchrun` describes; nothing without it.

    Args:
        device: "cpu" for gloo; "cuda" for NCCL, where each process takes the GPU of its number.
    """
    if not under_torchrun():
        yield
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device.startswith("cuda") else "gloo"
    # In torch 2.13 processes that are started anew find in torchrun's store the addresses of those
    # that are gone, and may try to reach them: each attempt has keys of its own.
    store, rank, size = next(rendezvous("env://"))
    prefixed: Any = vars(dist)["PrefixStore"]
    own = prefixed(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
