"""Messages of errors: the first line for quoting, and a test for missing memory."""

import torch

# Fragments of out-of-memory messages that torch raises as plain RuntimeError: the CPU allocator on
# Linux and on Windows, and GPU libraries.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "ALLOC_FAILED", "out of memory")


def first_line(problem: Exception) -> str:
    """The first line of an error's message; the name of its class if the message is empty."""
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__


def is_out_of_memory(problem: Exception) -> bool:
    """Whether an error means missing memory, and so no fault of model, loss or data."""
    if isinstance(problem, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(problem, RuntimeError) and any(sign in str(problem) for sign in OUT_OF_MEMORY)
