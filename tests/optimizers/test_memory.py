"""Peak memory of a step: at most K + 3m + 3 vectors beyond model, data and activations.

With m = 3 previous steps, the default, that is K + 12; with m = 1 it is K + 8.

Measured where it counts, as the resident memory of a process of its own, whose allocators give
back at once what is freed. The model is one that memory is seen in: a million parameters and so
few samples that activations are less than a tenth of one vector.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, FisherDiagonal
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.objective import Objective
from tests.preconditioners import at_once

K = 10
WIDTHS = 800, 800, 800  # two layers, 1.3 million parameters, 5 MB
SAMPLES = 8
SETTINGS: list[dict[str, Any]] = [
    {},
    {"curvature": "hessian", "weight_decay": 1e-3},
    {"micro_batch": 3, "lr": 0.9},
    {"activation_memory": 1000, "preconditioner": "identity"},  # nothing fits: graphs rebuilt
    {"basis": "sharded"},  # by itself a process holds all slices
    {"previous_steps": 1},
    {"previous_steps": 5},
]
ROUNDED = {"basis_dtype": torch.bfloat16}
KRONECKER = {"preconditioner": "kronecker"}
TOO_MUCH = {"preconditioner": "three vectors more"}
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ThreeVectorsMore(FisherDiagonal):
    """Holds three vectors too many, which the test must notice."""

    def update(self, objective: Objective, data: Any) -> Evaluation:
        found = super().update(objective, data)
        self.held = [found.gradient.clone() for _ in range(3)]
        return found


def data() -> tuple[Tensor, Tensor]:
    return torch.randn(SAMPLES, WIDTHS[0]), torch.randn(SAMPLES, WIDTHS[-1])


def build(settings: dict[str, Any]) -> KSD:
    torch.manual_seed(0)
    if settings == TOO_MUCH:
        settings = {"preconditioner": ThreeVectorsMore()}
    elif "preconditioner" in settings:
        settings = settings | {"preconditioner": at_once(settings["preconditioner"])}
    model = nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.Tanh(), nn.Linear(*WIDTHS[1:]))
    return KSD(model, nn.MSELoss(), dimension=K, bfgs_iterations=3, **settings)


def resident(which: str) -> int:
    """Bytes of resident memory: VmRSS now, VmHWM the most since `CLEAR` was written."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def previous_steps(settings: dict[str, Any]) -> int:
    """m."""
    found: int = settings.get("previous_steps", 3)
    return found


def bound(m: int) -> int:
    """Vectors beyond K."""
    return 8 if m == 1 else 3 * m + 3


def peak_in_vectors(settings: dict[str, Any]) -> float:
    """The peak of as many steps as it takes to have all previous ones, in parameter vectors."""
    batch, optimizer = data(), build(settings)
    before = resident("VmRSS")
    CLEAR.write_text("5")  # resets VmHWM
    ranks = [optimizer.step(batch).rank for _ in range(1 + previous_steps(settings))]
    assert ranks == list(range(K, K + len(ranks)))  # the basis was full
    return (resident("VmHWM") - before) / (optimizer.objective.parameters.numel * 4)


@pytest.fixture(scope="module")
def peaks() -> dict[str, float]:
    """The peak for each of the settings, from a process of its own."""
    give_back_at_once = {
        "MALLOC_MMAP_THRESHOLD_": "65536",  # glibc
        "MALLOC_TRIM_THRESHOLD_": "65536",
        "MIMALLOC_PURGE_DELAY": "0",  # what torch is built with on some platforms
    }
    child = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.optimizers.test_memory"],
        env=os.environ | give_back_at_once,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    found: dict[str, float] = json.loads(child.stdout)
    return found


def can_be_measured() -> bool:
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return "VmHWM" in STATUS.read_text()


needs_linux = pytest.mark.skipif(
    not can_be_measured(), reason="needs Linux: /proc/self/status and /proc/self/clear_refs"
)


@needs_linux
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_takes_at_most_so_many_vectors(
    settings: dict[str, Any], peaks: dict[str, float]
) -> None:
    m = previous_steps(settings)
    # More than the basis and what is kept between steps, or it was not measured.
    assert K + 2 * m + 1 < peaks[str(settings)] <= K + bound(m)


@needs_linux
def test_a_basis_in_bfloat16_takes_half_the_memory(peaks: dict[str, float]) -> None:
    rows = K + previous_steps(ROUNDED)
    blocks = 3 / 16 * rows  # that are converted at a time
    assert peaks[str(ROUNDED)] < peaks[str({})] - rows / 2 + blocks + 1


@needs_linux
def test_kronecker_factors_take_a_basis_more(peaks: dict[str, float]) -> None:
    m = previous_steps(KRONECKER)
    factors = 4  # two of each layer and their inverses, half a vector each
    twice = 2 * (K + m) + factors
    assert twice < peaks[str(KRONECKER)] <= twice + bound(m) - m + 1


@needs_linux
def test_three_vectors_more_would_be_noticed(peaks: dict[str, float]) -> None:
    assert peaks[str(TOO_MUCH)] > K + bound(previous_steps(TOO_MUCH))


# Activations --------------------------------------------------------------------------------------


def test_graphs_that_do_not_fit_are_rebuilt_with_the_same_result() -> None:
    x, y = torch.randn(30, 4).double(), torch.randn(30, 2).double()
    models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double() for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    plenty = KSD(models[0], nn.MSELoss(), dimension=4)
    scarce = KSD(models[1], nn.MSELoss(), dimension=4, activation_memory=1000)
    for _ in range(2):
        expected, found = plenty.step((x, y)), scarce.step((x, y))
        assert expected.graphs_kept
        assert not found.graphs_kept
        assert found.loss_after == pytest.approx(expected.loss_after, rel=1e-10)
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_the_micro_batch_is_sized_to_the_memory_for_activations() -> None:
    sizes = list[int]()
    model = nn.Sequential(nn.Linear(4, 100), nn.Tanh(), nn.Linear(100, 2))
    model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    KSD(model, nn.MSELoss(), dimension=2, activation_memory=40_000).step(
        (torch.randn(400, 4), torch.randn(400, 2))
    )
    # A sample keeps 100 hidden units and little more, of 4 bytes each.
    assert 40 < max(sizes) < 100


if __name__ == "__main__":
    torch.set_num_threads(1)
    for loading in ({}, KRONECKER):  # code and workspaces
        build(loading).step(data())
    measured = [*SETTINGS, ROUNDED, KRONECKER, TOO_MUCH]
    print(json.dumps({str(settings): peak_in_vectors(settings) for settings in measured}))
