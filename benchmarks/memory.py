"""Peak memory of a KSD step beyond model, data and activations, in vectors of n numbers.

Each case runs in a process of its own: as many steps as it takes until all previous steps that are
wanted join the basis, of a network so wide, on so few samples, that activations do not count.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import peak
from benchmarks.environment import sentence
from benchmarks.parts import Part, Section, Sections, Setting, markdown
from krylov_descent import KSD
from krylov_descent.curvature.products import CurvatureKind

STEPS = 4  # the last has three previous steps, the default
BOUND = 12  # the promise is K + 3m + 3 vectors


@dataclass(frozen=True)
class Case:
    """What to measure: K, the curvature, and a network of `depth` layers of width × width."""

    dimension: int
    curvature: CurvatureKind
    device: str = "cpu"
    width: int = 1500
    depth: int = 4
    samples: int = 16


CASES: dict[str, tuple[int, CurvatureKind]] = {
    "gauss-newton-10": (10, "gauss-newton"),
    "gauss-newton-20": (20, "gauss-newton"),
    "gauss-newton-40": (40, "gauss-newton"),
    "hessian-20": (20, "hessian"),
    "fisher-20": (20, "fisher"),
}


def sections(device: torch.device) -> list[str]:
    """One per case."""
    del device
    return list(CASES)


def measure(section: str, setting: Setting) -> Section:
    """A case, once: the peak does not depend on the clock."""
    dimension, curvature = CASES[section]
    return measure_case(Case(dimension, curvature, setting.device.type))


def measure_case(case: Case) -> Section:
    """Run a case in a fresh process."""
    peak.require(torch.device(case.device))
    row: Section = peak.in_own_process("benchmarks.memory", asdict(case))
    print(f"{case.curvature}, K = {case.dimension}: {row['vectors']:.1f} vectors")
    return row


def table(sections: Sections, device: torch.device) -> str:
    """One row per case."""
    del device
    measured = [sections[name] for name in CASES if name in sections]
    rows = [["curvature", "K", "peak in vectors", f"bound K + {BOUND}"]]
    rows += [
        [row["curvature"], str(row["dimension"]), f"{row['vectors']:.1f}", str(row["bound"])]
        for row in measured
    ]
    one = measured[0]
    caption = (
        f"Peak of {STEPS} KSD steps beyond the model and the data, in vectors of n = "
        f"{one['parameters']:,} numbers: {one['depth']} layers of {one['width']:,} units, "
        f"{one['samples']} samples, so that activations do not count. "
        f"{sentence(*(section['environment'] for section in measured))}."
    )
    return f"{markdown(rows)}\n\n{caption}"


PART = Part(sections=sections, measure=measure, tables={"": table})


# In the process of its own ------------------------------------------------------------------


def peak_of(case: Case) -> dict[str, Any]:
    """Some steps, and what they needed at most."""
    device = torch.device(case.device)
    # A small one first: libraries' buffers and threads are nobody's vectors.
    _steps(case, *_problem(case, 256, device))
    model, data = _problem(case, case.width, device)
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    used = peak.peak_of(lambda: _steps(case, model, data), device)
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


def _steps(case: Case, model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> None:
    optimizer = KSD(model, nn.MSELoss(), dimension=case.dimension, curvature=case.curvature)
    for _ in range(STEPS):
        result = optimizer.step(data)
        if not result.status.moved:
            raise RuntimeError(f"the step that is measured was not taken: {result}")


if __name__ == "__main__":
    print(json.dumps(peak_of(Case(**json.loads(sys.argv[1])))))
