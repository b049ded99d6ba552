"""One thread for a while, and then as many as before, whatever happened."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.runtime.threads import one_thread

THREADS = 3


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def test_one_thread_and_then_as_many_as_before() -> None:
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == THREADS


def test_an_error_does_not_leave_one_thread_behind() -> None:
    coordinates = Coordinates(torch.full((3, 3), torch.nan).double(), torch.eye(3), 1e-4)
    with pytest.raises(RuntimeError, match="linalg"):
        coordinates.find()
    assert torch.get_num_threads() == THREADS


# What the host does in a step on a GPU, as far as it needs none. Torch makes its threads when it
# first has work for them.
HOST_WORK = """
import json, os, numpy as np, torch
from krylov_descent.objective.batches import Batch, InMemory
from krylov_descent.algorithms.bfgs import BFGS
from krylov_descent.algorithms.minimizer import minimize
from krylov_descent.algorithms.noise import noise_from
from krylov_descent.objective.subsets import SubsetSizes, draw
from krylov_descent.algorithms.coordinates import Coordinates, cut

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
generator = torch.Generator().manual_seed(0)
samples = InMemory(Batch(torch.empty(100_000, 0), torch.empty(100_000, 0), 100_000))
basis, identity = torch.randn(81, 81), torch.eye(81)
before = threads()
draw(samples, SubsetSizes(100, 100, 80), generator)
subspace = cut(basis, torch.cat([identity, identity, torch.ones(1, 81)]))
coordinates = Coordinates(subspace.curvature, subspace.gram, 1e-4)
noise_from(torch.rand(2, dtype=torch.float64, generator=generator))

def function(a):
    moved = coordinates.to_basis(a)
    return float(moved @ moved), coordinates.from_gradient(2 * moved)

start = np.ones(81)
minimize(BFGS(start, *function(start), max_iterations=5, noise=0.0), function)
made = threads() - before
torch.tril(torch.randn(200, 200))
print(json.dumps({"made": made, "in the end": threads() - before}))
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_the_host_wakes_no_thread_between_waits_for_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOST_WORK], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if found["in the end"] <= 0:
        pytest.skip("torch makes no threads here, even where it has work for them")
    assert found["made"] <= 0
