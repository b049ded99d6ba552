"""A plugin for pytest that runs kernels by Triton's interpreter, on tensors of the CPU.

    TRITON_INTERPRET=1 python -m pytest -p tests.cuda.triton.interpreter -m interpreted tests/cuda

The interpreter runs a kernel's programs one after another in NumPy, so it finds wrong numbers and
wrong indices; it finds no races, and compiles nothing. Streams and events are replaced by objects
that do nothing, and two functions of CUDA's library, which the interpreter lacks, by NumPy's.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.language.extra import libdevice
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from krylov_descent.cuda.triton import availability, launching


class Event:
    """One that is over at once."""


class Stream:
    """A stream on which everything is done as soon as it is launched."""

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        pass


STREAM = Stream()
# Of the imagined GPU: few, so that sums are divided into several parts, but not into many.
MULTIPROCESSORS = 4


def by_numpy(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a block of numbers for the interpreter."""

    def applied(x: Any) -> Any:
        numbers = function(x.handle.data).astype(x.handle.data.dtype)
        return tl.core.tensor(TensorHandle(numbers, x.handle.dtype), x.type)

    return applied


def current_stream(device: Any = None) -> Any:
    """The only one."""
    return STREAM


def create_splat(builder: Any, block: Any, number: Any) -> Any:
    """A block of one number; of a bool it is one of bools, which a mask has to be."""
    numbers = np.full(block.shape, number.data, dtype=number.data.dtype)
    return TensorHandle(numbers, number.dtype.scalar)


launch = GridExecutor.__call__


def launch_unseen(executor: Any, *args: Any, **options: Any) -> None:
    """Launch a kernel; the interpreter's own operations on tensors pass by nobody."""
    with _disable_current_modes(), np.errstate(all="ignore"):
        launch(executor, *args, **options)


GridExecutor.__call__ = launch_unseen
InterpreterBuilder.create_splat = create_splat
torch.cuda.current_stream = current_stream
libdevice.tanh, libdevice.log1p = by_numpy(np.tanh), by_numpy(np.log1p)
availability.possible = lambda device: True
launching.multiprocessors = lambda device: MULTIPROCESSORS  # type: ignore[assignment]
launching._specialised = lambda kernel: []
