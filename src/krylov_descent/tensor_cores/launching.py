"""How Triton's kernels are launched."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from krylov_descent.messages import first_line

# Of numbers that are each made of several, a program makes so many.
SHORT = 512

_compiled: dict[tuple[Any, ...], Any] = {}


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
    parts = itertools.chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in args)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    aligned = [tensor.data_ptr() % 16 == 0 for tensor in tensors]
    where = max(tensor.get_device() for tensor in tensors)  # one may be in the host's memory
    dtype = tensors[0].dtype
    kind = (kernel.__name__, where, dtype, *constants, *options.values(), *aligned)
    compiled = _compiled.get(kind)
    try:
        if compiled is None:
            _compiled[kind] = kernel[grid](*args, *constants, **options)
        else:
            compiled[(*grid, 1)](*args, *constants)
    except RuntimeError:
        raise
    except Exception as problem:  # Triton's own are none of torch's
        raise RuntimeError(f"a kernel of Triton failed: {first_line(problem)}") from problem


def or_else(given: Tensor | None, other: Tensor) -> Tensor:
    """For an argument that a kernel does not look at: any of its kind."""
    return other if given is None else given


@functools.cache
def multiprocessors(device: int) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
