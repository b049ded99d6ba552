"""Kernels are compiled by another process, once on a machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from krylov_descent.cuda.triton import availability, entry
from krylov_descent.cuda.triton.availability import Availability
from tests.cuda.triton.kernels import DEVICE, needs_tensor_cores

__all__ = ["needs_tensor_cores"]  # a fixture

# Trains a net that is large enough for the kernels. Prints whether they could be used at the first
# and at the last step, and the loss after each step.
TRAINING = """
import torch
from torch import nn
from krylov_descent import KSD
from krylov_descent.cuda.triton.availability import availability

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 16)).cuda()
x, y = torch.randn(500, 256, device="cuda"), torch.randn(500, 16, device="cuda")
optimizer = KSD(model, nn.MSELoss(), tf32=False)
kernels = availability(torch.device("cuda", 0))
losses = [optimizer.step((x, y)).loss]
print(kernels.usable)
if WAIT:
    kernels.wait()
losses += [optimizer.step((x, y)).loss for _ in range(2)]
print(kernels.usable)
print(*losses)
"""


def test_there_are_no_kernels_for_a_cpu() -> None:
    assert not Availability(torch.device("cpu")).usable
    with entry.tensor_core_products(torch.device("cpu")) as products:
        assert products is None


def trained(cache: Path, *, wait: bool) -> tuple[str, str, list[float]]:
    """What `TRAINING` prints in a fresh process."""
    env = os.environ | {
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    run = subprocess.run(
        [sys.executable, "-c", TRAINING.replace("WAIT", str(wait))],
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    first, last, losses = run.stdout.splitlines()
    return first, last, [float(loss) for loss in losses.split()]


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_no_step_waits_for_the_compiler(tmp_path: Path) -> None:
    first, last, losses = trained(tmp_path, wait=True)
    assert (first, last) == ("False", "True")
    # The kernels are in the cache now, so the next process has them from its first step on.
    first, last, others = trained(tmp_path, wait=False)
    assert (first, last) == ("True", "True")
    assert losses == pytest.approx(others, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("needs_tensor_cores")
def test_without_a_compiler_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the other process nor this one can compile."""

    def broken(device: torch.device) -> None:
        raise RuntimeError("no C compiler was found")

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(availability, "TRIAL", "krylov_descent.no_such_module")
    monkeypatch.setattr("krylov_descent.cuda.triton.trial.try_out", broken)
    kernels = Availability(DEVICE)
    with pytest.warns(UserWarning, match="no C compiler was found"):
        kernels.wait()
    assert not kernels.usable
