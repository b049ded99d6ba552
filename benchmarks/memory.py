"""Peak memory of a KSD step beyond model, data and activations, in vectors of n numbers.

Each case runs in a process of its own: two steps (from the second on the previous step joins the
basis) of a network so wide, on so few samples, that activations do not count. On the CPU the peak
is what the system saw of the process; on the GPU what torch allocated.
"""

import gc
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from benchmarks.environment import UnavailableError, sentence
from krylov_descent import KSD
from krylov_descent.curvature import CurvatureKind

STATUS = Path("/proc/self/status")
BOUND = 8  # the promise is K + 8 vectors
# Freed blocks go back to the system at once, both in glibc and in mimalloc (which torch uses on
# ARM): the peak is then one of living tensors, not of what an allocator keeps for later.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16), "MIMALLOC_PURGE_DELAY": "0"}


@dataclass(frozen=True)
class Case:
    """What to measure: K, the curvature, and a network of `depth` layers of width × width."""

    dimension: int
    curvature: CurvatureKind
    device: str = "cpu"
    width: int = 1500
    depth: int = 4
    samples: int = 16


CASES = (
    (10, "gauss-newton"),
    (20, "gauss-newton"),
    (40, "gauss-newton"),
    (20, "hessian"),
    (20, "fisher"),
)


def measure(device: torch.device, repeats: int) -> dict[str, Any]:
    """All cases, once each: the peak does not depend on the clock."""
    del repeats
    cases = [Case(k, cast("CurvatureKind", kind), device.type) for k, kind in CASES]
    return {"rows": [measure_case(case) for case in cases]}


def measure_case(case: Case) -> dict[str, Any]:
    """Run a case in a fresh process."""
    if case.device == "cpu" and not STATUS.exists():
        raise UnavailableError("peak memory on the CPU is read from /proc, which this system lacks")
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps(asdict(case))]
    root = Path(__file__).parents[1]
    found = subprocess.run(
        command, cwd=root, env=os.environ | ALLOCATOR, capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise RuntimeError(f"the memory of {case} could not be measured:\n{found.stderr}")
    row: dict[str, Any] = json.loads(found.stdout)
    print(f"{case.curvature}, K = {case.dimension}: {row['vectors']:.1f} vectors")
    return row


def table(result: dict[str, Any]) -> str:
    """One row per case."""
    lines = ["| curvature | K | peak in vectors | bound K + 8 |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {row['curvature']} | {row['dimension']} | {row['vectors']:.1f} | {row['bound']} |"
        for row in result["rows"]
    ]
    one = result["rows"][0]
    caption = (
        f"Peak of two KSD steps beyond the model and the data, in vectors of n = "
        f"{one['parameters']:,} numbers: {one['depth']} layers of {one['width']:,} units, "
        f"{one['samples']} samples, so that activations do not count. "
        f"{sentence(result['environment'])}."
    )
    return "\n".join(lines) + f"\n\n{caption}"


# In the process of its own ------------------------------------------------------------------


def peak_of(case: Case) -> dict[str, Any]:
    """Two steps, and what they needed at most."""
    device = torch.device(case.device)
    # A small one first: libraries' buffers and threads are nobody's vectors.
    _two_steps(case, *_problem(case, 256, device))
    model, data = _problem(case, case.width, device)
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    gc.collect()
    before = _bytes_now(device)
    _two_steps(case, model, data)
    used = _bytes_at_most(device) - before
    return {
        **asdict(case),
        "parameters": count,
        "bytes": used,
        "vectors": used / (count * parameters[0].element_size()),
        "bound": case.dimension + BOUND,
    }


def _problem(
    case: Case, width: int, device: torch.device
) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Tanh(), nn.Linear(width, width)) for _ in range(case.depth)]
    data = torch.rand(case.samples, width), torch.rand(case.samples, width)
    return nn.Sequential(*layers).to(device), (data[0].to(device), data[1].to(device))


def _two_steps(case: Case, model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer = KSD(model, nn.MSELoss(), dimension=case.dimension, curvature=case.curvature)
    for _ in range(2):
        result = optimizer.step(data)
        if not result.status.moved:
            raise RuntimeError(f"the step that is measured was not taken: {result}")


def _bytes_now(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def _bytes_at_most(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UnavailableError(f"{STATUS} has no {field}")


if __name__ == "__main__":
    print(json.dumps(peak_of(Case(**json.loads(sys.argv[1])))))
