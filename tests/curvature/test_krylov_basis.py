"""The basis of a step: Algorithm 2 with curvature on B, against dense float64 matrices."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Storage
from krylov_descent.curvature.krylov_basis import BasisKind, BasisLayout, KrylovBasis
from krylov_descent.curvature.preconditioners.preconditioner import FisherDiagonal, Preconditioner
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.batches import Batch, as_samples
from krylov_descent.objective.objective import Objective
from tests import dense
from tests.matrices import numbers
from tests.problems import SAMPLES, Problem, make
from tests.subspaces import gram_error, outside, vectors

K = 4
MATRICES: dict[CurvatureKind, Callable[[Problem], Tensor]] = {
    "gauss-newton": dense.gauss_newton,
    "hessian": dense.hessian,
    "fisher": dense.fisher,
}


def nothing_to_learn(objective: Objective, batches: Sequence[Batch]) -> bool:
    return False


def work_of(
    problem: Problem,
    kind: CurvatureKind = "gauss-newton",
    *,
    layout: BasisKind = "replicated",
    learn: Callable[[Objective, Sequence[Batch]], bool] = nothing_to_learn,
    **limits: Any,
) -> KrylovBasis:
    """The basis of a step with the Fisher diagonal and one previous step, where A is B."""
    objective = Objective(problem.model, problem.loss, **limits)
    D: Preconditioner = FisherDiagonal()
    gradient = D.update(objective, problem.data).gradient
    return KrylovBasis(
        objective=objective,
        curvature=Curvature(kind),
        samples=as_samples(problem.data),
        preconditioner=D,
        learn=learn,
        gradient=gradient,
        previous_steps=[numbers(len(gradient), seed=2)],
        most_previous=1,
        provided_for=0,
        dimension=K,
        layout=BasisLayout(layout, Storage()),
    )


def fisher_diagonal(problem: Problem) -> Tensor:
    """D with a largest entry of 1 and a floor of 1e-4."""
    squares = dense.squares(problem)
    return (squares / squares.max()).clamp(min=1e-4)


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
@pytest.mark.parametrize("kind", MATRICES)
def test_it_spans_the_krylov_space_of_the_dense_matrices_and_the_previous_step(
    kind: CurvatureKind, layout: BasisKind
) -> None:
    problem = make("mlp", "per-sample")
    work = work_of(problem, kind, layout=layout)
    H, D = MATRICES[kind](problem), fisher_diagonal(problem)
    previous = work.previous_steps[0].clone()
    found = work.run()
    subspace = found.subspace
    assert subspace.rank == K + 1
    assert gram_error(subspace, D) < 1e-10
    power = dense.gradient(problem) / D
    for _ in range(K):
        assert outside(subspace, power) < 1e-8
        power = H @ power / D
    assert outside(subspace, previous) < 1e-10
    V = vectors(subspace)
    torch.testing.assert_close(subspace.curvature, V @ H @ V.T, rtol=1e-9, atol=1e-9)
    assert found.samples == SAMPLES
    assert found.graphs_kept
    assert work.previous_steps == []


def test_the_preconditioner_learns_from_all_samples_of_the_curvature_set() -> None:
    seen = list[int]()

    def learn(objective: Objective, batches: Sequence[Batch]) -> bool:
        seen.append(sum(batch.size for batch in batches))
        return True

    found = work_of(make("mlp", "mse"), learn=learn, micro_batch=2).run()
    assert seen == [SAMPLES]
    assert found.samples_for_metric == SAMPLES


def test_graphs_that_do_not_fit_are_made_for_each_product() -> None:
    problem = make("mlp", "mse")
    kept, rebuilt = work_of(problem).run(), work_of(problem, activation_memory=1).run()
    assert kept.graphs_kept
    assert not rebuilt.graphs_kept
    torch.testing.assert_close(vectors(rebuilt.subspace), vectors(kept.subspace))
    torch.testing.assert_close(rebuilt.subspace.curvature, kept.subspace.curvature)
