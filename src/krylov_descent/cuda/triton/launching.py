"""Launching Triton's kernels with little work for the host."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.private import specialised_places

# Results that one program computes, where each is a sum.
SHORT = 512

_compiled: dict[tuple[Any, ...], Any] = {}
_specialised_of: dict[str, list[int]] = {}
# Of all threads, since a backward pass has its own: while it is not empty, no kernel is loaded.
_only_loaded: list[None] = []


class NotLoadedError(RuntimeError):
    """A kernel would have to be loaded where that is not allowed."""


def launch(
    kernel: Any,
    grid: tuple[int, int],
    args: Sequence[Any],
    constants: Sequence[Any],
    **options: Any,
) -> None:
    """Launch a kernel; the first of its kind in Triton's way, others without its checks.

    Args:
        kernel: one of `kernels`.
        grid: blocks along both axes.
        args: a tensor, and others. Numbers that Triton may know to be multiples of 16 always are.
        constants: the arguments in capitals, which come last.
        options: that go with the constants.

    Raises:
        NotLoadedError: the kernel is not loaded, in a `loaded_kernels_alone`.
        RuntimeError: Triton cannot compile or launch it.
    """
    tensors = [args[i] for i in _specialised(kernel) if isinstance(args[i], Tensor)]
    aligned = [x.data_ptr() % 16 == 0 for x in tensors]
    where = args[0].get_device(), args[0].dtype
    kind = (kernel.__name__, *where, *constants, *options.values(), *aligned)
    compiled = _compiled.get(kind)
    try:
        if compiled is None:
            # In this capture, that is; elsewhere another thread may load what it wants.
            if _only_loaded and torch.cuda.is_current_stream_capturing():
                raise NotLoadedError(f"the kernel {kernel.__name__} is not loaded")
            _compiled[kind] = kernel[grid](*args, *constants, **options)
        else:
            compiled[(*grid, 1)](*args, *constants)
    except RuntimeError:
        raise
    except Exception as problem:  # Triton's own are none of torch's
        raise RuntimeError(f"a kernel of Triton failed: {first_line(problem)}") from problem


def _specialised(kernel: Any) -> list[int]:
    """The arguments for which Triton compiles another kernel where their memory begins evenly."""
    name = kernel.__name__
    if name not in _specialised_of:
        _specialised_of[name] = list(specialised_places(kernel))
    return _specialised_of[name]


@contextmanager
def loaded_kernels_alone() -> Iterator[None]:
    """For a while a capture raises `NotLoadedError` where a kernel would have to be loaded."""
    _only_loaded.append(None)
    try:
        yield
    finally:
        _only_loaded.pop()


def or_else(given: Tensor | None, other: Tensor) -> Tensor:
    """For an argument that a kernel does not look at: any of its kind."""
    return other if given is None else given


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
