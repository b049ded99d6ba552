"""Curvature products beside the dense float64 matrix that they must equal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from krylov_descent.curvature.products import Curvature, CurvatureKind, CurvatureProduct
from krylov_descent.objective.objective import Objective
from tests import dense
from tests.matrices import numbers
from tests.problems import Problem

DENSE: dict[CurvatureKind, Callable[[Problem], Tensor]] = {
    "gauss-newton": dense.gauss_newton,
    "hessian": dense.hessian,
    "fisher": dense.fisher,
}
KINDS = list(DENSE)


def product_of(
    problem: Problem, kind: CurvatureKind, data: Any = None, **settings: Any
) -> CurvatureProduct:
    objective = Objective(problem.model, problem.loss, **settings)
    return Curvature(kind).at(objective, problem.data if data is None else data)


def assert_equals_dense(product: CurvatureProduct, matrix: Tensor, vectors: int = 2) -> None:
    for seed in range(vectors):
        v = numbers(len(matrix), seed=seed)
        expected = matrix @ v
        scale = float(matrix.abs().max() * v.norm())
        torch.testing.assert_close(product(v), expected, rtol=1e-11, atol=1e-13 * scale)
