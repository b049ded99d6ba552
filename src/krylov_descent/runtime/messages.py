"""What an error says: quoted in another, or asked for its cause."""

import torch

# Of errors for which torch has no type of their own: a CPU's allocator on Linux and on Windows, and
# libraries on a GPU.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "ALLOC_FAILED", "out of memory")


def first_line(problem: Exception) -> str:
    """The first line of an error's message."""
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__


def is_out_of_memory(problem: Exception) -> bool:
    """Whether memory was missing, which says nothing about model, loss or data."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and any(sign in str(problem) for sign in OUT_OF_MEMORY)
