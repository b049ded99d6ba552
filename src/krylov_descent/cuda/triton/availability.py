"""Whether the tensor-core kernels can be used on a GPU, and their compilation by another process.

Compiling all kernels takes ten seconds and more, once on a machine: Triton keeps them in its cache.
No step waits for that. Until another process has compiled and tested them, steps run on torch's
operations, whose results agree to rounding.
"""

import functools
import importlib.util
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from krylov_descent.runtime.messages import first_line

# Bytes of a multiprocessor's shared memory that the largest tiles need. Hopper and later data
# centre GPUs have them.
LEAST_MEMORY = 200 << 10
TRIAL = "krylov_descent.cuda.triton.trial"


class Availability:
    """Whether the kernels can be used on a GPU.

    Args:
        device: the GPU, with its index.

    Attributes:
        came_late: whether the kernels have become usable after the first step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiler: subprocess.Popen[bytes] | None = None
        self._load: Callable[[], bool] = lambda: False
        self.came_late = False
        if _is_fit(device):
            # Loading Triton takes half a second, in which a step can begin.
            pool = ThreadPoolExecutor(1)
            self._load = pool.submit(self._loaded_or_begun).result
            pool.shutdown(wait=False)

    @property
    def usable(self) -> bool:
        """Whether the kernels can be used; changed by `update` and `wait` only."""
        return self.came_late or self._usable_at_once

    @functools.cached_property
    def _usable_at_once(self) -> bool:
        return _works(self._load)

    def _loaded_or_begun(self) -> bool:
        """Load kernels that have passed their trial on this machine; otherwise begin the trial."""
        from krylov_descent.cuda.triton import trial  # needs Triton

        if trial.was_passed(self._device):
            trial.load_one(self._device)
            return True
        command = [sys.executable, "-P", "-m", TRIAL, str(self._device.index)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        quiet = subprocess.DEVNULL
        self._compiler = subprocess.Popen(
            command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet
        )
        return False

    def update(self) -> None:
        """Make the kernels usable if they have been compiled meanwhile."""
        if self._compiler is not None and self._compiler.poll() is not None:
            self.wait()

    def wait(self) -> None:
        """Wait until the kernels are compiled."""
        if not self.usable and self._compiler is not None:
            compiler, self._compiler = self._compiler, None
            # Where a second process may not use the GPU, this one compiles.
            self.came_late = compiler.wait() == 0 or _works(self._tried_here)

    def _tried_here(self) -> bool:
        from krylov_descent.cuda.triton import trial  # needs Triton

        trial.try_out(self._device)
        return True


@functools.cache
def availability(device: torch.device) -> Availability:
    """The availability of the kernels on a device, one object for all optimisers."""
    return Availability(device)


def possible(device: torch.device) -> bool:
    """Whether the kernels can be used on a device now."""
    return availability(device).usable


def _is_fit(device: torch.device) -> bool:
    """Whether the kernels should work: Triton is installed, and tiles fit in shared memory."""
    if device.type != "cuda" or torch.version.hip or importlib.util.find_spec("triton") is None:
        return False
    properties: Any = torch.cuda.get_device_properties(device)  # annotations lack some fields
    return bool(properties.shared_memory_per_block_optin >= LEAST_MEMORY)


def _works(attempt: Callable[[], bool]) -> bool:
    """The result of an attempt to use the kernels; False, with a warning, if it fails."""
    try:
        return attempt()
    except Exception as problem:  # whatever a compiler or a driver may raise
        warnings.warn(
            f"Triton's kernels do not work here ({first_line(problem)}); products of float32 "
            "matrices run without them, which is slower",
            stacklevel=2,
        )
        return False
