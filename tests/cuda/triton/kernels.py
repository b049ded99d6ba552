"""Helpers for tests of Triton's kernels: on a GPU, or by Triton's interpreter on the CPU."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from krylov_descent.cuda.graphs.recorded_operations import recorded_operations
from krylov_descent.cuda.triton import availability, entry
from krylov_descent.runtime.precision import SETTINGS

# With TRITON_INTERPRET=1 kernels run on tensors of the CPU (see `interpreter`).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu") if INTERPRETED else torch.device("cuda", 0)
# Relative errors of products with the digits of float32, and of tf32.
EXACT, ROUGH = 3e-7, 1e-3


@pytest.fixture
def needs_tensor_cores() -> None:
    if not availability.possible(DEVICE):
        pytest.skip("this GPU has no tensor cores that the kernels are for")


@pytest.fixture
def products(needs_tensor_cores: None) -> Iterator[Any]:
    with torch.device(DEVICE), on_tensor_cores() as found:
        yield found


def on_tensor_cores(before: Any = None) -> AbstractContextManager[Any]:
    """The dispatch mode and the operations of a recording, whether or not one is made."""
    return recorded_operations(entry.tensor_core_products(DEVICE, before))


def launches(monkeypatch: pytest.MonkeyPatch, *modules: str) -> list[str]:
    """The kernels that these modules of `cuda.triton` launch from now on, by name."""
    names: list[str] = []

    def counting(launch: Callable[..., None]) -> Callable[..., None]:
        def counted(kernel: Any, *args: Any, **options: Any) -> None:
            names.append(kernel.__name__)
            launch(kernel, *args, **options)

        return counted

    for name in modules:
        module = pytest.importorskip(f"krylov_descent.cuda.triton.{name}")
        monkeypatch.setattr(module, "launch", counting(module.launch))
    return names


@contextmanager
def set_to(precision: str) -> Iterator[None]:
    """Torch's precision of products of float32 matrices."""
    SETTINGS.fp32_precision = precision
    try:
        yield
    finally:
        SETTINGS.fp32_precision = "none"


def error(found: Tensor, exact: Tensor) -> float:
    """‖found - exact‖ / ‖exact‖."""
    return float(((found.double() - exact).norm() / exact.norm()).detach())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal random numbers of float32 on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.float32)
