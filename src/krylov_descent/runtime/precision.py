"""TensorFloat-32 for derivatives, where three digits are enough, and not for forward passes.

A weight that is rounded is rounded alike for every sample, so a forward pass in tf32 has values and
derivatives at another point, and no mean over samples makes up for that. What is rounded on the way
back is a thousandth of the derivative itself.

Torch has one setting for the whole process. Whoever changes it here holds `threads.cuda_turn` for
as long as it is changed, and so does every step on CUDA, whatever its precision: no step runs in
the precision of another one, and the setting from outside is always put back. What is not a step
and runs on CUDA in another thread meanwhile, an evaluation of the model for example, may get tf32.
The setting means nothing on a CPU, so steps there do not wait, unless they ask for tf32.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from krylov_descent.runtime.threads import cuda_turn

SETTINGS: Any = torch.backends.cuda.matmul  # whose annotations lack the setting
TF32_EPSILON = 2.0**-10


class _Outside(threading.local):
    """What torch was set to outside, for each `derivatives_in_tf32` that this thread is in."""

    def __init__(self) -> None:
        self.settings: list[str] = []


_outside = _Outside()


@contextmanager
def derivatives_in_tf32(wanted: bool) -> Iterator[None]:
    """Matrix products of float32 in TensorFloat-32, on GPUs that have it; not in forward passes."""
    if not wanted:  # to write back what was read would end its being inherited
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
    """For a forward pass, and what needs as many digits: the setting that is outside.

    Nothing in a thread that is not in `derivatives_in_tf32`.
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
    """The setting for derivatives, also while a forward pass has another one."""
    here: str = SETTINGS.fp32_precision
    return "tf32" if _outside.settings else here


@contextmanager
def rough_products(device: torch.device) -> Iterator[None]:
    """Matrix products of float32 in TensorFloat-32, unless torch was told how it is to do them.

    For sums of squares that are no part of a derivative: their terms cannot cancel.

    Args:
        device: of the matrices; nothing is changed for one that has no tf32.
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
    """The settings now, in a forward pass of this thread and elsewhere."""
    here: str = SETTINGS.fp32_precision
    return _outside.settings[-1] if _outside.settings else here, here


def epsilon_of(dtype: torch.dtype, device: torch.device) -> float:
    """Machine epsilon of matrix products in a dtype, as torch is set now."""
    tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return TF32_EPSILON if tf32 and dtype == torch.float32 else torch.finfo(dtype).eps
