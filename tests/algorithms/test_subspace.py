"""The Krylov subspace against dense float64 algebra.

The paper's claims that are tested here: what the subspace spans (Section 4), that the solution
of K steps of conjugate gradients lies in it for every damping λ (Section 3), and that the
previous step is part of it from the second step on (Algorithm 2, line 8).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.algorithms.metric import Diagonal
from krylov_descent.curvature.preconditioners.preconditioner import Identity
from tests.matrices import numbers, symmetric
from tests.subspaces import (
    D_PREV,
    DIAGONAL,
    ONES,
    PREVIOUS,
    SPECTRA,
    Build,
    Dear,
    G,
    N,
    basis_in_one_process,
    gram_error,
    outside,
    vectors,
)


def conjugate_gradients(A: Tensor, b: Tensor, steps: int, D: Tensor | None = None) -> Tensor:
    """Textbook CG on Ax = b from zero, with a diagonal preconditioner D [n]."""
    D = torch.ones_like(b) if D is None else D
    x, r = torch.zeros_like(b), b.clone()
    z = r / D
    p = z
    for _ in range(steps):
        Ap = A @ p
        alpha = (r @ z) / (p @ Ap)
        x = x + alpha * p
        new_r = r - alpha * Ap
        new_z = new_r / D
        p = new_z + (new_r @ new_z) / (r @ z) * p
        r, z = new_r, new_z
    return x


# The basis -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dimension", [1, 5, 20])
@pytest.mark.parametrize(
    "make",
    [
        lambda n: torch.linspace(1, 2, n),
        lambda n: torch.logspace(-4, 4, n),
        lambda n: torch.logspace(-4, 4, n) * (-1.0) ** torch.arange(n),
        lambda n: torch.cat([torch.ones(n - 3), torch.tensor([1e3, 1e5, 1e7])]),
    ],
    ids=["flat", "steep", "indefinite", "outliers"],
)
def test_basis_is_orthonormal_in_the_preconditioner(
    build: Build, make: Callable[[int], Tensor], dimension: int, dtype: torch.dtype
) -> None:
    H = symmetric(make(200)).to(dtype)
    D = (0.01 + numbers(200, seed=3).square()).to(dtype)
    g, d_prev = numbers(200, seed=1).to(dtype), numbers(200, seed=2).to(dtype)
    subspace, _ = build(H, D, g, [d_prev], dimension)
    assert vectors(subspace).dtype == dtype
    assert gram_error(subspace, D) < (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("D", [ONES, DIAGONAL], ids=["identity", "diagonal"])
def test_span_is_the_preconditioned_krylov_space(build: Build, spectrum: str, D: Tensor) -> None:
    K = 6
    H = symmetric(SPECTRA[spectrum])
    subspace, products = build(H, D, G, [], K)

    powers = [G / D]
    for _ in range(K - 1):
        powers.append(H @ powers[-1] / D)
    # Independent vectors of the same number inside the span: both spans are equal.
    normalised = torch.stack([p / p.norm() for p in powers])
    assert int(torch.linalg.matrix_rank(normalised)) == K
    assert subspace.rank == products == K
    for power in powers:
        assert outside(subspace, power) < 1e-10
    assert outside(subspace, H @ powers[-1] / D) > 1e-5  # and the next one is not


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("previous", PREVIOUS, ids=len)
def test_curvature_is_the_dense_projection(
    build: Build, spectrum: str, previous: list[Tensor]
) -> None:
    H = symmetric(SPECTRA[spectrum])
    subspace, _ = build(H, DIAGONAL, G, previous, 7)
    assert subspace.rank == 7 + len(previous)
    V = vectors(subspace)
    torch.testing.assert_close(subspace.curvature, V @ H @ V.t(), rtol=0, atol=1e-12)
    assert torch.equal(subspace.curvature, subspace.curvature.t())


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_ritz_values_are_those_of_the_papers_orthonormal_basis(build: Build, spectrum: str) -> None:
    H = symmetric(SPECTRA[spectrum])
    subspace, _ = build(H, DIAGONAL, G, PREVIOUS[2], 6)
    V = vectors(subspace)
    torch.testing.assert_close(subspace.gram, V @ V.t())
    powers = [G / DIAGONAL]
    for _ in range(5):
        powers.append(H @ powers[-1] / DIAGONAL)
    Q = torch.linalg.qr(torch.stack([v / v.norm() for v in powers + PREVIOUS[2]], 1)).Q
    expected = torch.linalg.eigvalsh(Q.t() @ H @ Q)
    found = Coordinates(subspace.curvature, subspace.gram, 1e-4).ritz_values
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_curvature_is_float64_for_float32_vectors(build: Build) -> None:
    H = symmetric(SPECTRA["positive"]).float()
    subspace, _ = build(H, ONES.float(), G.float(), [D_PREV.float()], 7)
    V = vectors(subspace).double()
    assert subspace.curvature.dtype == torch.float64
    torch.testing.assert_close(subspace.curvature, V @ H.double() @ V.t(), rtol=0, atol=1e-5)


def test_first_vector_is_the_preconditioned_gradient(build: Build) -> None:
    subspace, _ = build(symmetric(SPECTRA["positive"]), DIAGONAL, G, [D_PREV], 5)
    first = G / DIAGONAL
    torch.testing.assert_close(
        vectors(subspace)[0], first / (first * DIAGONAL * first).sum().sqrt()
    )


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("dimension", [1, 2, 12])
def test_previous_step_lies_in_the_span(build: Build, dimension: int, scale: float) -> None:
    H = symmetric(SPECTRA["indefinite"])
    subspace, products = build(H, DIAGONAL, G, [scale * D_PREV], dimension)
    assert subspace.rank == products == dimension + 1
    assert outside(subspace, D_PREV) < 1e-13
    without, _ = build(H, DIAGONAL, G, [], dimension)
    assert outside(without, D_PREV) > 0.1
    # It only adds: the Krylov part is the same.
    assert torch.equal(vectors(subspace)[:dimension], vectors(without))


def test_of_previous_steps_those_that_add_something_join(build: Build) -> None:
    H, (first, second, third) = symmetric(SPECTRA["indefinite"]), PREVIOUS[2]
    mixture = first + 2 * second - G / DIAGONAL
    subspace, products = build(H, DIAGONAL, G, [first, 0 * first, second, mixture, third], 4)
    assert subspace.rank == products == 4 + 3
    for step in (first, second, mixture, third):
        assert outside(subspace, step) < 1e-13
    expected, _ = build(H, DIAGONAL, G, [first, second, third], 4)
    torch.testing.assert_close(vectors(subspace), vectors(expected), rtol=0, atol=1e-13)
    torch.testing.assert_close(subspace.curvature, expected.curvature, rtol=0, atol=1e-12)


def test_the_basis_alone_holds_previous_steps_in_the_end() -> None:
    joining = [step.clone() for step in PREVIOUS[2]]
    basis_in_one_process(torch.clone, Identity(), G, joining, 2)
    assert joining == []


def test_gradient_and_previous_step_are_not_written_to(build: Build) -> None:
    g, d_prev = G.clone(), D_PREV.clone()
    build(symmetric(SPECTRA["positive"]), ONES, g, [d_prev], 5)
    assert torch.equal(g, G)
    assert torch.equal(d_prev, D_PREV)


def test_combine_and_project_are_the_basis_and_its_transpose(build: Build) -> None:
    subspace, _ = build(symmetric(SPECTRA["positive"]), ONES, G, [D_PREV], 4)
    c, v = numbers(5, seed=5), numbers(N, seed=6)
    torch.testing.assert_close(subspace.combine(c), vectors(subspace).t() @ c)
    torch.testing.assert_close(subspace.project(v), vectors(subspace) @ v)
    torch.testing.assert_close(subspace.project(subspace.combine(c)), c)


def test_combine_and_project_keep_vectors_in_their_dtype_and_small_ones_in_float64(
    build: Build,
) -> None:
    H = symmetric(SPECTRA["positive"]).float()
    subspace, _ = build(H, ONES.float(), G.float(), [], 4)
    assert subspace.combine(numbers(4)).dtype == torch.float32
    assert subspace.project(G.float()).dtype == torch.float64


def test_a_matrix_is_multiplied_with_twice_for_each_previous_step() -> None:
    H, g = symmetric(SPECTRA["indefinite"]), G
    D = Dear(DIAGONAL)
    steps = [D_PREV, numbers(N, seed=4)]
    found = basis_in_one_process(lambda v: H @ v, D, g, list(steps), 8)
    assert D.multiplied == 4
    expected = basis_in_one_process(lambda v: H @ v, Diagonal(DIAGONAL), g, list(steps), 8)
    torch.testing.assert_close(vectors(found), vectors(expected), rtol=1e-9, atol=1e-9)


# The paper's claim: any damped CG solution is inside ------------------------------------------

LAMBDAS = [0.0, 1e-4, 0.3, 10.0, 1e4]


@pytest.mark.parametrize("damping", LAMBDAS)
@pytest.mark.parametrize("K", [1, 4, 8])
def test_cg_solution_of_every_damping_lies_in_the_subspace(
    build: Build, K: int, damping: float
) -> None:
    H = symmetric(SPECTRA["positive"])
    d = conjugate_gradients(H + damping * torch.diag(ONES), -G, K)
    subspace, _ = build(H, ONES, G, [], K)
    assert outside(subspace, d) < 1e-10
    smaller, _ = build(H, ONES, G, [], max(1, K - 1))
    assert K == 1 or damping > 1e3 or outside(smaller, d) > 1e-6  # it takes all K


@pytest.mark.parametrize("damping", LAMBDAS)
@pytest.mark.parametrize("K", [1, 4, 8])
def test_preconditioned_cg_solution_lies_in_the_subspace(
    build: Build, K: int, damping: float
) -> None:
    H = symmetric(SPECTRA["positive"])
    damped = H + damping * torch.diag(DIAGONAL)
    subspace, _ = build(H, DIAGONAL, G, [], K)
    assert outside(subspace, conjugate_gradients(damped, -G, K, DIAGONAL)) < 1e-9
    if damping and K > 1:
        # λD is what is meant: with λI, D-preconditioned CG leaves this subspace.
        other = conjugate_gradients(H + damping * torch.diag(ONES), -G, K, DIAGONAL)
        assert damping < 0.1 or outside(subspace, other) > 1e-4


def test_damped_newton_step_lies_in_the_subspace_when_k_reaches_n(build: Build) -> None:
    n = 8
    H = symmetric(torch.linspace(-3, 4, n))
    g = numbers(n, seed=1)
    subspace, _ = build(H, torch.ones(n, dtype=torch.float64), g, [], n)
    assert outside(subspace, torch.linalg.solve(H + 5 * torch.eye(n), g)) < 1e-12
