"""What every test starts from: fixed seeds, one thread, float32, and no GPU test without a GPU."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from krylov_descent import KSD
from tests.subspaces import METRICS, Build, builder

# One thread: sums are taken in one order on every machine, and the small models of the suite are
# faster without the hand-over between threads.
torch.set_num_threads(1)

# GPU machines may lack hypothesis; there only the files with GPU tests are collected.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("deterministic", derandomize=True, deadline=None)
    settings.load_profile("deterministic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where torch sees no CUDA device, and nothing stands in for it."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU: run `make test-gpu` on a machine with one")
    by_interpreter = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        interpreted = by_interpreter and item.get_closest_marker("interpreted") is not None
        if item.get_closest_marker("gpu") is not None and not interpreted:
            item.add_marker(skip)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let tests on a GPU have the tensor-core kernels and recordings from their first step on."""
    if item.get_closest_marker("gpu") is not None and torch.cuda.is_available():
        from krylov_descent.cuda.triton.availability import availability

        availability(torch.device("cuda", 0)).wait()
        KSD._eager_steps = 0


@pytest.fixture(autouse=True)
def fixed_seeds_and_default_dtype() -> Iterator[None]:
    """Give each test the same random numbers, whatever ran before it, and float32 as default."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (third parties draw from the global generator)
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="module", params=METRICS)
def build(request: pytest.FixtureRequest) -> Build:
    """Krylov subspaces, with a D that says that it is diagonal and with one that does not."""
    return builder(request.param)
