"""Clocks, and many timings as a median with its spread."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Value = TypeVar("Value")
# Median, lowest and highest.
Spread = dict[str, float]


def timed(function: Callable[[], Value], device: torch.device) -> tuple[float, Value]:
    """Wall-clock seconds of a call, until the device has done all of it."""
    _finish(device)
    start = time.perf_counter()
    value = function()
    _finish(device)
    return time.perf_counter() - start, value


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest, for JSON."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def show(found: Spread) -> str:
    """A spread in a table: 1.21 (1.19 to 1.24)."""
    return f"{found['median']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
