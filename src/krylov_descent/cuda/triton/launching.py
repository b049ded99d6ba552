"""Launching of Triton kernels with little overhead on the host."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.private import specialised_places

# Results per program, in kernels whose results are sums.
SHORT = 512

_compiled: dict[tuple[Any, ...], Any] = {}
_specialised_of: dict[str, list[int]] = {}
# While not empty, no kernel is loaded. Shared by all threads, since a backward pass has its own.
_only_loaded: list[None] = []


class NotLoadedError(RuntimeError):
    """A kernel is not loaded yet, within `loaded_kernels_alone`."""


def launch(
    kernel: Any,
    grid: tuple[int, int],
    args: Sequence[Any],
    constants: Sequence[Any],
    **options: Any,
) -> None:
    """Launch a kernel; only the first launch of a specialisation goes through Triton's checks.

    Args:
        kernel: a Triton kernel.
        grid: number of programs along both axes.
        args: a tensor, then others. Integers that Triton specialises on are multiples of 16.
        constants: the constexpr arguments (in capitals), which come last.
        options: Triton's launch options.

    Raises:
        NotLoadedError: the kernel is not loaded, within `loaded_kernels_alone`.
        RuntimeError: Triton cannot compile or launch the kernel.
    """
    tensors = [args[i] for i in _specialised(kernel) if isinstance(args[i], Tensor)]
    aligned = [x.data_ptr() % 16 == 0 for x in tensors]
    where = args[0].get_device(), args[0].dtype
    kind = (kernel.__name__, *where, *constants, *options.values(), *aligned)
    compiled = _compiled.get(kind)
    try:
        if compiled is None:
            # Other threads, which are not capturing, may load kernels.
            if _only_loaded and torch.cuda.is_current_stream_capturing():
                raise NotLoadedError(f"the kernel {kernel.__name__} is not loaded")
            _compiled[kind] = kernel[grid](*args, *constants, **options)
        else:
            compiled[(*grid, 1)](*args, *constants)
    except RuntimeError:
        raise
    except Exception as problem:  # Triton has its own classes of errors
        raise RuntimeError(f"a kernel of Triton failed: {first_line(problem)}") from problem


def _specialised(kernel: Any) -> list[int]:
    """The places of arguments on whose alignment Triton specialises a kernel."""
    name = kernel.__name__
    if name not in _specialised_of:
        _specialised_of[name] = list(specialised_places(kernel))
    return _specialised_of[name]


@contextmanager
def loaded_kernels_alone() -> Iterator[None]:
    """Context: a capture raises `NotLoadedError` instead of loading a kernel."""
    _only_loaded.append(None)
    try:
        yield
    finally:
        _only_loaded.pop()


def or_else(given: Tensor | None, other: Tensor) -> Tensor:
    """The given tensor, or another one as placeholder for an argument that is not read."""
    return other if given is None else given


@functools.cache
def multiprocessors(device: int) -> int:
    """The number of multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
