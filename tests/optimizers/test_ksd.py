"""The mathematics of a KSD step, against dense float64 matrices, closed forms and SciPy."""

from typing import Any

import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

from krylov_descent import KSD, FisherDiagonal, Status
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.optimizers.ksd.ksd_state import PREVIOUS_STEP
from tests import dense
from tests.preconditioners import at_once
from tests.problems import Problem, make
from tests.subspaces import basis_in_one_process, vectors

CURVATURES: list[CurvatureKind] = ["gauss-newton", "hessian", "fisher"]
PRECONDITIONERS = ["fisher-diagonal", "identity"]
PREVIOUS_STEPS = ["previous_step", "previous_step_2"]


def curvature_matrix(problem: Problem, kind: CurvatureKind) -> Tensor:
    if kind == "gauss-newton":
        return dense.gauss_newton(problem)
    if kind == "hessian":
        return dense.hessian(problem)
    rows = dense.per_sample_gradients(problem)
    return rows.T @ rows / len(rows)


def preconditioner_diagonal(problem: Problem, name: str, epsilon: float = 1e-4) -> Tensor:
    squares = dense.squares(problem)
    if name == "identity":
        return torch.ones_like(squares)
    return squares.clamp(min=epsilon * float(squares.max()))


def span(problem: Problem, kind: CurvatureKind, name: str, dimension: int) -> list[Tensor]:
    """(D⁻¹H)ᵏ D⁻¹g, 0 ≤ k < K, normalised, by dense matrices."""
    H, D = curvature_matrix(problem, kind), preconditioner_diagonal(problem, name)
    vectors = [dense.gradient(problem) / D]
    for _ in range(dimension - 1):
        image = H @ vectors[-1] / D
        vectors.append(image / image.norm())
    return vectors


def orthonormal(vectors: list[Tensor]) -> Tensor:
    Q: Tensor = torch.linalg.qr(torch.stack([v / v.norm() for v in vectors], 1)).Q
    return Q


def previous_step(optimizer: KSD) -> Tensor:
    return torch.cat([s[PREVIOUS_STEP].reshape(-1) for s in optimizer.state.values()])


# The subspace and the search in it ------------------------------------------------------------


@pytest.mark.parametrize("kind", CURVATURES)
@pytest.mark.parametrize("name", PRECONDITIONERS)
@pytest.mark.parametrize("previous_steps", [1, 2])
def test_steps_minimise_over_krylov_vectors_and_previous_steps(
    kind: CurvatureKind, name: str, previous_steps: int
) -> None:
    problem = make("mlp", "per-sample")
    optimizer = KSD(
        problem.model,
        problem.loss,
        dimension=4,
        curvature=kind,
        preconditioner=name,
        previous_steps=previous_steps,
        bfgs_iterations=300,
    )
    previous: list[Tensor] = []
    for step in range(4):
        Q = orthonormal(span(problem, kind, name, 4) + previous)
        before, gradient_before = dense.point(problem), dense.gradient(problem)
        result = optimizer.step(problem.data)
        taken = dense.point(problem) - before
        assert result.status is Status.MOVED
        assert result.rank == result.products == 4 + min(step, previous_steps)
        # It lies in the span, and is stationary within: the rest of the gradient is outside.
        assert float((taken - Q @ (Q.T @ taken)).norm()) < 1e-9 * float(taken.norm())
        rest = float((Q.T @ dense.gradient(problem)).norm())
        assert rest < 1e-4 * float(gradient_before.norm())
        previous = [taken, *previous][:previous_steps]
        for kept, expected in zip(PREVIOUS_STEPS, previous, strict=False):
            found = torch.cat([s[kept].reshape(-1) for s in optimizer.state.values()])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert all(list(s) == PREVIOUS_STEPS[:previous_steps] for s in optimizer.state.values())


def test_the_previous_step_is_what_makes_the_second_step_longer() -> None:
    """It was orthogonalised and then dropped by earlier programs."""
    problem = make("mlp", "per-sample")
    optimizer = KSD(problem.model, problem.loss, dimension=3)
    optimizer.step(problem.data)
    d, krylov = previous_step(optimizer), orthonormal(span(problem, "gauss-newton", "identity", 3))
    assert float((d - krylov @ (krylov.T @ d)).norm()) > 0.1 * float(d.norm())

    # The library's own basis, made of what the optimiser keeps.
    objective = optimizer.objective
    preconditioner = FisherDiagonal()
    gradient = preconditioner.update(objective, problem.data).gradient
    product = Curvature("gauss-newton").at(objective, problem.data)
    D = preconditioner.diagonal
    basis = vectors(basis_in_one_process(product, preconditioner, gradient, [d.clone()], 3))
    assert basis.shape[0] == 4
    assert float((d - basis.T @ (basis @ (D * d))).norm()) < 1e-12 * float(d.norm())
    without = vectors(basis_in_one_process(product, preconditioner, gradient, [], 3))
    assert float((d - without.T @ (without @ (D * d))).norm()) > 0.1 * float(d.norm())


def test_the_search_finds_scipys_minimum_of_the_subspace() -> None:
    problem = make("linear", "cross-entropy")  # convex: the minimum is unique
    Q, theta = (
        orthonormal(span(problem, "gauss-newton", "fisher-diagonal", 3)),
        dense.point(problem),
    )

    def function(c: Any) -> tuple[float, Any]:
        coefficients = torch.from_numpy(c).requires_grad_()
        value = dense.losses_at(problem, theta + Q @ coefficients).mean()
        (gradient,) = torch.autograd.grad(value, coefficients)
        return float(value.detach()), gradient.numpy()

    best = scipy.optimize.minimize(
        function, torch.zeros(3).double().numpy(), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    result = KSD(problem.model, problem.loss, dimension=3, bfgs_iterations=100).step(problem.data)
    assert result.loss_after == pytest.approx(best.fun, rel=1e-9)
    torch.testing.assert_close(
        Q.T @ (dense.point(problem) - theta), torch.from_numpy(best.x), rtol=1e-5, atol=1e-5
    )


def test_ritz_values_are_eigenvalues_where_the_krylov_space_is_exhausted() -> None:
    problem = make("linear", "weighted-cross-entropy")
    exact = torch.linalg.eigvalsh(dense.gauss_newton(problem))
    optimizer = KSD(problem.model, problem.loss, dimension=100, preconditioner="identity")
    result = optimizer.step(problem.data)
    found = torch.tensor(result.ritz_values, dtype=torch.float64)
    assert result.rank == len(found) <= len(exact)
    assert bool((found.diff() >= 0).all())
    positive = exact[exact > 1e-6 * exact.max()]
    torch.testing.assert_close(found[-len(positive) :], positive, rtol=1e-6, atol=0)


# Quadratics ----------------------------------------------------------------------------------


def regression(samples: int = 40) -> tuple[nn.Linear, Tensor, Tensor]:
    model = nn.Linear(5, 3).double()
    return model, torch.randn(samples, 5).double(), torch.randn(samples, 3).double()


def ridge(x: Tensor, y: Tensor, decay: float) -> tuple[Tensor, float]:
    """Minimiser [6, 3] and minimum of mean((Xw - y)²) + ½λ‖w‖², by the normal equations."""
    X = torch.cat([x, torch.ones(len(x), 1).double()], 1)
    scale = 2.0 / y.numel()
    w = torch.linalg.solve(scale * X.T @ X + decay * torch.eye(6).double(), scale * X.T @ y)
    return w, float(((X @ w - y) ** 2).mean() + 0.5 * decay * (w**2).sum())


@pytest.mark.parametrize("kind", ["gauss-newton", "hessian"])
@pytest.mark.parametrize("name", [*PRECONDITIONERS, "kronecker"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_one_step_reaches_the_minimum_of_a_quadratic(
    kind: CurvatureKind, name: str, decay: float
) -> None:
    model, x, y = regression()
    w, minimum = ridge(x, y, decay)
    optimizer = KSD(
        model,
        nn.MSELoss(),
        dimension=20,  # n = 18
        curvature=kind,
        preconditioner=at_once(name),
        weight_decay=decay,
    )
    result = optimizer.step((x, y))
    assert result.samples == result.curvature_samples == result.objective_samples == 40
    assert result.loss_after == pytest.approx(minimum, rel=1e-15, abs=0)
    torch.testing.assert_close(model.weight, w[:5].T, rtol=0, atol=1e-14)
    torch.testing.assert_close(model.bias, w[5], rtol=0, atol=1e-14)
    # There is nothing left to do but the last bit.
    assert optimizer.step((x, y)).loss_after == pytest.approx(minimum, rel=1e-15, abs=0)


def test_the_fisher_matrix_reaches_it_by_the_search_alone() -> None:
    model, x, y = regression()
    optimizer = KSD(model, nn.MSELoss(), dimension=20, curvature="fisher", bfgs_iterations=200)
    result = optimizer.step((x, y))
    assert result.loss_after == pytest.approx(ridge(x, y, 0.0)[1], rel=1e-12)


@pytest.mark.parametrize("split", [False, True])
def test_weight_decay_is_half_lambda_times_the_squared_norm(split: bool) -> None:
    """By hand the term is part of every sample's loss; only Hessian and identity see it alike."""
    torch.manual_seed(1)
    by_hand = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    built_in = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    built_in.load_state_dict(by_hand.state_dict())
    data = torch.randn(12, 4).double(), torch.randn(12, 2).double()
    decays = [0.4, 0.01, 0.4, 0.01] if split else [0.1] * 4  # weights and biases

    def penalised(outputs: Tensor, targets: Tensor) -> Tensor:
        squares = [
            0.5 * decay * (p**2).sum()
            for p, decay in zip(by_hand.parameters(), decays, strict=True)
        ]
        return ((outputs - targets) ** 2).mean(1) + sum(squares)

    weights = [built_in[0].weight, built_in[2].weight]
    biases = [built_in[0].bias, built_in[2].bias]
    groups = [{"params": weights, "weight_decay": 0.4}, {"params": biases, "weight_decay": 0.01}]
    settings: dict[str, Any] = {
        "dimension": 5,
        "curvature": "hessian",
        "preconditioner": "identity",
    }
    theirs = KSD(by_hand, penalised, **settings)
    ours = KSD(built_in, nn.MSELoss(), groups if split else None, weight_decay=0.1, **settings)
    for _ in range(2):
        expected, found = theirs.step(data), ours.step(data)
        assert found.loss == pytest.approx(expected.loss, rel=1e-12)
        assert found.loss_after == pytest.approx(expected.loss_after, rel=1e-9)
        for p, q in zip(by_hand.parameters(), built_in.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
