"""Peak memory: on a GPU what torch allocated, on a CPU what the system saw of the process.

The system's figure counts living tensors only in a process whose allocator gives freed blocks
back at once, which it must be told before it starts: `in_own_process`.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import UnavailableError

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# Both for glibc and for mimalloc, which torch uses on ARM.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MIMALLOC_PURGE_DELAY": "0"}


def in_own_process(module: str, case: dict[str, Any]) -> Any:
    """Run a module with a case as its argument; what it prints last, read as JSON."""
    command = [sys.executable, "-m", module, json.dumps(case)]
    root = Path(__file__).parents[1]
    found = subprocess.run(
        command, cwd=root, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise RuntimeError(f"the memory of {case} could not be measured:\n{found.stderr}")
    return json.loads(found.stdout.splitlines()[-1])


def require(device: torch.device) -> None:
    """Say so where peak memory cannot be measured."""
    if device.type == "cpu" and not (STATUS.exists() and CLEAR.exists()):
        raise UnavailableError("peak memory on the CPU is read from /proc, which this system lacks")


def peak_of(function: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call needed at most, beyond what there was before it."""
    before = start(device)
    result = function()
    used = highest(device) - before
    del result
    return used


def start(device: torch.device) -> int:
    """Begin anew to look for the highest; the bytes there are now."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    CLEAR.write_text("5")  # sets VmHWM back to VmRSS
    return _status("VmRSS")


def highest(device: torch.device) -> int:
    """The most bytes there were since `start`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UnavailableError(f"{STATUS} has no {field}")
