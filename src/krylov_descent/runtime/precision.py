"""TensorFloat-32 (tf32) for derivatives, where three digits are enough, but not for forward passes.

A forward pass in tf32 rounds a weight in the same way for every sample. Its values and derivatives
belong to another point, and averaging over samples does not remove that error. Rounding in a
backward pass changes the derivative by about a thousandth.

Torch has one precision setting per process. Code here holds `threads.cuda_turn` while the setting
is changed, and restores it afterwards. Every step on CUDA holds that lock too, so no step runs with
the precision of another step. Other work on CUDA in another thread, such as an evaluation of the
model, may run in tf32 meanwhile. The setting has no effect on a CPU, so steps on a CPU do not wait
for the lock unless they ask for tf32.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from krylov_descent.runtime.threads import cuda_turn

SETTINGS: Any = torch.backends.cuda.matmul  # Any: torch's annotations lack `fp32_precision`
TF32_EPSILON = 2.0**-10
FIRST_WITH_TF32 = (8, 0)  # the compute capability


class _Outside(threading.local):
    """The settings from before each `derivatives_in_tf32` that this thread has entered."""

    def __init__(self) -> None:
        self.settings: list[str] = []


_outside = _Outside()


def tf32_suggests_itself(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU computes float32 in tf32, and torch was not told how to multiply."""
    if device.type != "cuda" or dtype != torch.float32:
        return False
    free = SETTINGS.fp32_precision == "none"
    return free and torch.cuda.get_device_capability(device) >= FIRST_WITH_TF32


@contextmanager
def derivatives_in_tf32(wanted: bool) -> Iterator[None]:
    """Context manager: float32 matrix products on CUDA in tf32, except in `forward_precision`."""
    if not wanted:  # writing the setting back would stop it from following torch's global setting
        yield
        return
    with cuda_turn():
        _outside.settings.append(SETTINGS.fp32_precision)
        SETTINGS.fp32_precision = "tf32"
        try:
            yield
        finally:
            SETTINGS.fp32_precision = _outside.settings.pop()


@contextmanager
def forward_precision() -> Iterator[None]:
    """Context manager for a forward pass: the setting from before `derivatives_in_tf32`.

    It does nothing in a thread that has not entered `derivatives_in_tf32`.
    """
    if not _outside.settings:
        yield
        return
    here, SETTINGS.fp32_precision = SETTINGS.fp32_precision, _outside.settings[-1]
    try:
        yield
    finally:
        SETTINGS.fp32_precision = here


def derivative_precision() -> str:
    """The precision setting for derivatives, also when called within `forward_precision`."""
    here: str = SETTINGS.fp32_precision
    return "tf32" if _outside.settings else here


@contextmanager
def rough_products(device: torch.device) -> Iterator[None]:
    """Context manager: float32 matrix products in tf32, unless the user has set torch's precision.

    It is for sums of squares that are no part of a derivative. Their terms cannot cancel.

    Args:
        device: of the matrices. Nothing changes unless it is a CUDA device.
    """
    if device.type != "cuda":
        yield
        return
    with cuda_turn():
        free = SETTINGS.fp32_precision == "none"
        if free:
            SETTINGS.fp32_precision = "tf32"
        try:
            yield
        finally:
            if free:
                SETTINGS.fp32_precision = "none"


def precisions() -> tuple[str, str]:
    """The pair (setting for forward passes of this thread, setting in force here)."""
    here: str = SETTINGS.fp32_precision
    return _outside.settings[-1] if _outside.settings else here, here


def epsilon_of(dtype: torch.dtype, device: torch.device) -> float:
    """Machine epsilon of matrix products in a dtype under torch's current setting."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return TF32_EPSILON if tf32 and dtype == torch.float32 else torch.finfo(dtype).eps
