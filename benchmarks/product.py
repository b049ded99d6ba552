"""What a curvature product costs, in gradients of the same batch: seconds and peak memory.

The yardstick is torch's own gradient: forward, loss, backward. Each product is followed by one
gradient, so that both see the same machine and their ratio is steadier than either. A run is a
set-up and the products of one KSD step with K = 20; the other library does the same. What a
library does once in its life (compiling, recording) is done before.
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import peak
from benchmarks.agreement import Built, build
from benchmarks.candidates import KINDS, OURS, PEER, Candidate, Prepare, ours, theirs
from benchmarks.environment import UnavailableError, version_of
from benchmarks.parts import Part, Section, Setting
from benchmarks.product_tables import autoencoder_table, models_table
from benchmarks.timing import spread, timed
from benchmarks.workloads import WORKLOADS, Workload
from krylov_descent.curvature.products import CurvatureKind

# The README's table has Fisher's matrix too.
CURVATURES: dict[str, Sequence[CurvatureKind]] = {"autoencoder": KINDS}
OTHER_CURVATURES: Sequence[CurvatureKind] = ("gauss-newton", "hessian")
PRODUCTS = 20


@dataclass(frozen=True)
class Run:
    """One set-up with its products, in gradients measured between them."""

    with_setup: float
    without_setup: float
    gradient_seconds: float


def sections(device: torch.device) -> list[str]:
    """One per network."""
    del device
    return list(WORKLOADS)


def measure(section: str, setting: Setting) -> Section:
    """Time every candidate in turn, `repeats` times around, and take its peak memory."""
    torch.compiler.reset()  # what was compiled for other networks counts against a limit
    kinds = CURVATURES.get(section, OTHER_CURVATURES)
    workload = WORKLOADS[section](setting.device)
    measured = measure_workload(workload, kinds, setting.repeats, PRODUCTS)
    for row, used in zip(measured["rows"], _memory(section, setting.device), strict=True):
        row["memory"] = used
    return measured


def measure_workload(
    workload: Workload,
    kinds: Sequence[CurvatureKind],
    repeats: int,
    products: int,
    peer: str = PEER,
) -> Section:
    """The times; without the other library if it is not there."""
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(workload.parameters, generator=generator).to(workload.inputs.device)
    skipped = [] if version_of(peer) else [peer]
    if skipped:
        print(f"{peer} skipped: it is not installed")
    # Ours first: what the other library leaves in the process (compiled code, for one) made our
    # products 2% dearer.
    own = build(ours(kinds), workload, vector)
    measured = _timed_candidates(own, workload, vector, repeats, products)
    if not skipped:
        everyone = build(ours(kinds) + theirs(kinds), workload, vector)
        others = [built for built in everyone if built.candidate.library != OURS]
        measured += _timed_candidates(others, workload, vector, repeats, products)
    return {
        "settings": {
            "title": workload.title,
            "parameters": workload.parameters,
            "samples": len(workload.inputs),
            "products": products,
            "repeats": repeats,
        },
        "rows": [_row(built, runs) for built, runs in measured],
        "skipped": skipped,
    }


def _timed_candidates(
    candidates: list[Built], workload: Workload, vector: Tensor, repeats: int, products: int
) -> list[tuple[Built, list[Run]]]:
    """The runs of each, in turn; none of what could not be built."""
    runs: list[list[Run]] = [[] for _ in candidates]
    for repeat in range(repeats):
        for built, found in zip(candidates, runs, strict=True):
            if built.prepare is None:
                continue
            found.append(_run(built.prepare, workload, vector, products))
            print(
                f"repeat {repeat + 1} of {repeats}, {built.candidate.library}, "
                f"{built.candidate.curvature}: {found[-1].with_setup:.3f} gradients a product",
                flush=True,
            )
    return list(zip(candidates, runs, strict=True))


def _run(prepare: Prepare, workload: Workload, vector: Tensor, products: int) -> Run:
    device = vector.device
    setup, product = timed(prepare, device)
    product_seconds, gradient_seconds = [], []
    for _ in range(products):
        product_seconds.append(timed(lambda: product(vector), device)[0])
        gradient_seconds.append(timed(workload.gradient, device)[0])
    gradient = statistics.median(gradient_seconds)
    return Run(
        with_setup=(setup + sum(product_seconds)) / sum(gradient_seconds),
        # The first product builds the graphs of all, so it counts as set-up.
        without_setup=statistics.median(product_seconds[1:]) / gradient,
        gradient_seconds=gradient,
    )


def _row(built: Built, runs: list[Run]) -> dict[str, Any]:
    row: dict[str, Any] = {
        "library": built.candidate.library,
        "curvature": built.candidate.curvature,
    }
    if built.prepare is None:
        return row | {"failed": built.failure}
    if built.off is not None:
        row["off"] = built.off
    return row | {
        "gradients": spread([run.with_setup for run in runs]),
        "without_setup": spread([run.without_setup for run in runs]),
        "gradient_seconds": spread([run.gradient_seconds for run in runs]),
        "runs": [run.with_setup for run in runs],
    }


# Peak memory ----------------------------------------------------------------------------------


def _memory(section: str, device: torch.device) -> list[dict[str, float] | None]:
    """Of each candidate; None for what fails, and for all where it cannot be measured."""
    if device.type == "cuda":
        return memory_of(section, device)
    try:
        peak.require(device)
    except UnavailableError as reason:
        print(f"memory skipped: {reason}")
        return [None] * len(_all_candidates(section))
    found: list[dict[str, float] | None] = peak.in_own_process(
        "benchmarks.product", {"section": section, "device": device.type}
    )
    return found


def memory_of(section: str, device: torch.device) -> list[dict[str, float] | None]:
    """Set-up and a product of each candidate, beyond what there was before.

    On a GPU "before" is before it was built, since recordings stay allocated. On a CPU nothing
    does, but code that is loaded or compiled counts as the process's memory: before is afterwards.
    """
    workload = WORKLOADS[section](device)
    vector = torch.ones(workload.parameters, device=device)
    workload.gradient()
    gradient = peak.peak_of(workload.gradient, device)
    found: list[dict[str, float] | None] = []
    for candidate in _all_candidates(section):
        before = peak.start(device)
        try:
            # Compiling and recording need more for a while, and once.
            prepare = candidate.build(workload)
            prepare()(vector)
        except Exception:
            found.append(None)
            continue
        now = peak.start(device)
        before = now if device.type == "cpu" else before
        prepare()(vector)
        used = peak.highest(device) - before
        found.append({"bytes": used, "gradients": used / gradient})
        del prepare
    return found


def _all_candidates(section: str) -> list[Candidate]:
    kinds = CURVATURES.get(section, OTHER_CURVATURES)
    return ours(kinds) + (theirs(kinds) if version_of(PEER) else [])


PART = Part(
    sections=sections,
    measure=measure,
    tables={"": autoencoder_table, "models": models_table},
)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(memory_of(asked["section"], torch.device(asked["device"]))))
