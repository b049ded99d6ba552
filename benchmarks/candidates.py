"""Curvature products of this library and of curvlinops, by one interface.

Three stages: `build` is what a library does once in its life for a model (compiling, recording),
`prepare` what each step needs (the parameters have moved), and the product itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.workloads import Workload
from krylov_descent import Objective
from krylov_descent.curvature.products import Curvature, CurvatureKind

OURS, EAGER, COMPILED = "krylov-descent", "curvlinops", "curvlinops, compiled"
PEER = "curvlinops-for-pytorch"  # the distribution
KINDS: tuple[CurvatureKind, ...] = get_args(CurvatureKind)

Product = Callable[[Tensor], Tensor]
Prepare = Callable[[], Product]


@dataclass(frozen=True)
class Candidate:
    """One curvature of one library."""

    library: str
    curvature: CurvatureKind
    build: Callable[[Workload], Prepare]


def ours(kinds: Sequence[CurvatureKind] = KINDS) -> list[Candidate]:
    """This library's curvatures, as KSD uses them."""
    return [Candidate(OURS, kind, partial(_build_ours, kind)) for kind in kinds]


def theirs(kinds: Sequence[CurvatureKind] = KINDS) -> list[Candidate]:
    """The same matrices by curvlinops, as it is and compiled."""
    candidates = [Candidate(EAGER, kind, partial(_build_theirs, kind)) for kind in kinds]
    compilable = [kind for kind in kinds if kind != "fisher"]
    return candidates + [
        Candidate(COMPILED, kind, partial(_build_theirs, kind, compiled=True))
        for kind in compilable
    ]


def _build_ours(kind: CurvatureKind, workload: Workload) -> Prepare:
    objective = Objective(workload.model, workload.loss)
    if workload.inputs.is_cuda:  # the engine that an optimiser has there
        from krylov_descent.cuda.engine import CudaEngine

        objective.engine = CudaEngine(objective)
    curvature = Curvature(kind)
    return lambda: curvature.at(objective, (workload.inputs, workload.targets))


def _build_theirs(kind: CurvatureKind, workload: Workload, *, compiled: bool = False) -> Prepare:
    import curvlinops

    operators: dict[CurvatureKind, Any] = {
        "gauss-newton": curvlinops.GGNLinearOperator,
        "hessian": curvlinops.HessianLinearOperator,
        "fisher": curvlinops.EFLinearOperator,
    }

    def operator() -> Any:
        return operators[kind](
            workload.model,
            workload.loss,
            list(workload.model.parameters()),
            [(workload.inputs, workload.targets)],
            check_deterministic=False,
        )

    # What it calls for each batch. As one graph or not at all: in pieces it would run as it does
    # without being compiled.
    batch_product = (
        torch.compile(operator()._mp, fullgraph=True, dynamic=False) if compiled else None
    )

    def prepare() -> Product:
        matrix = operator()
        if batch_product is not None:
            matrix._mp = batch_product

        def product(vector: Tensor) -> Tensor:
            # Fused attention has no second derivatives.
            with sdpa_kernel(SDPBackend.MATH):
                found: Tensor = matrix @ vector
            return found

        return product

    return prepare
