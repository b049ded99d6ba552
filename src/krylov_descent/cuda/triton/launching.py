"""How Triton's kernels are launched."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from krylov_descent.runtime.messages import first_line
from krylov_descent.runtime.private import specialised_places

# Of numbers that are each made of several, a program makes so many.
SHORT = 512

_compiled: dict[tuple[Any, ...], Any] = {}
_specialised_of: dict[str, list[int]] = {}


@dataclass(slots=True)
class _Loading:
    """Whether kernels may be loaded; for all threads, since a backward pass has its own."""

    allowed: bool = True


_loading = _Loading()


class NotLoadedError(RuntimeError):
    """A kernel would have to be loaded where that is not allowed."""


def launch(
    kernel: Any,
    grid: tuple[int, int],
    args: Sequence[Any],
    constants: Sequence[Any],
    **options: Any,
) -> None:
    """Launch a kernel; by Triton's way for the first of its kind, and a shorter one for the others.

    Args:
        kernel: one of `kernels`.
        grid: blocks along both axes.
        args: of the kernel, some of them tuples. Where they are numbers that Triton may know to be
            multiples of 16, they always are.
        constants: those in capitals, which come last.
        options: that go with the constants.
    """
    tensor = _tensors_in(args)[0]
    aligned = [x.data_ptr() % 16 == 0 for x in _tensors_in([args[i] for i in _specialised(kernel)])]
    where = tensor.get_device(), tensor.dtype
    kind = (kernel.__name__, *where, *constants, *options.values(), *aligned)
    compiled = _compiled.get(kind)
    try:
        if compiled is None:
            # In this capture, that is; elsewhere another thread may load what it wants.
            if not _loading.allowed and torch.cuda.is_current_stream_capturing():
                raise NotLoadedError(f"the kernel {kernel.__name__} is not loaded")
            _compiled[kind] = kernel[grid](*args, *constants, **options)
        else:
            compiled[(*grid, 1)](*args, *constants)
    except RuntimeError:
        raise
    except Exception as problem:  # Triton's own are none of torch's
        raise RuntimeError(f"a kernel of Triton failed: {first_line(problem)}") from problem


def _tensors_in(args: Sequence[Any]) -> list[Tensor]:
    parts = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in args)
    return [part for part in parts if isinstance(part, Tensor)]


def _specialised(kernel: Any) -> list[int]:
    """The arguments for which Triton makes another kernel where they begin evenly.

    Those that it is told not to look at may be no tuples, in which it does so all the same.
    """
    name = kernel.__name__
    if name not in _specialised_of:
        _specialised_of[name] = list(specialised_places(kernel))
    return _specialised_of[name]


@contextmanager
def loaded_kernels_alone() -> Iterator[None]:
    """For a while a capture raises `NotLoadedError` where a kernel would have to be loaded."""
    _loading.allowed = False
    try:
        yield
    finally:
        _loading.allowed = True


def or_else(given: Tensor | None, other: Tensor) -> Tensor:
    """For an argument that a kernel does not look at: any of its kind."""
    return other if given is None else given


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
