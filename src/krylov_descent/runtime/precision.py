"""TensorFloat-32 for derivatives, where three digits are enough, and not for forward passes.

A weight that is rounded is rounded alike for every sample, so a forward pass in tf32 has values and
derivatives at another point, and no mean over samples makes up for that. What is rounded on the way
back is a thousandth of the derivative itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SETTINGS: Any = torch.backends.cuda.matmul  # whose annotations lack the setting
# What torch was set to outside, for each `derivatives_in_tf32` that is under way.
_outside: list[str] = []


@contextmanager
def derivatives_in_tf32(wanted: bool) -> Iterator[None]:
    """Matrix products of float32 in TensorFloat-32, on GPUs that have it; not in forward passes."""
    if not wanted:  # to write back what was read would end its being inherited
        yield
        return
    _outside.append(SETTINGS.fp32_precision)
    SETTINGS.fp32_precision = "tf32"
    try:
        yield
    finally:
        SETTINGS.fp32_precision = _outside.pop()


@contextmanager
def forward_precision() -> Iterator[None]:
    """For a forward pass, and what needs as many digits: the setting that is outside."""
    if not _outside:
        yield
        return
    here, SETTINGS.fp32_precision = SETTINGS.fp32_precision, _outside[-1]
    try:
        yield
    finally:
        SETTINGS.fp32_precision = here


def derivative_precision() -> str:
    """The setting for derivatives, also while a forward pass has another one."""
    here: str = SETTINGS.fp32_precision
    return "tf32" if _outside else here


@contextmanager
def rough_products() -> Iterator[None]:
    """Matrix products of float32 in TensorFloat-32, unless torch was told how it is to do them.

    For sums of squares that are no part of a derivative: their terms cannot cancel.
    """
    free = SETTINGS.fp32_precision == "none"
    if free:
        SETTINGS.fp32_precision = "tf32"
    try:
        yield
    finally:
        if free:
            SETTINGS.fp32_precision = "none"


def precisions() -> tuple[str, str]:
    """The settings now, in a forward pass and elsewhere."""
    here: str = SETTINGS.fp32_precision
    return _outside[-1] if _outside else here, here
