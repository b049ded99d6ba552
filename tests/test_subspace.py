"""The Krylov subspace against dense float64 algebra.

The paper's claims that are tested here: what the subspace spans (Section 4), that the solution
of K steps of conjugate gradients lies in it for every damping λ (Section 3), and that the
previous step is part of it from the second step on (Algorithm 2, line 8).
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from krylov_descent.preconditioner import Diagonal, Identity, Metric
from krylov_descent.subspace import Coordinates, Subspace, krylov_basis
from tests.matrices import eigenbasis, numbers, symmetric


class Dear:
    """D as any matrix might be given: nothing says that it is diagonal."""

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal, self.multiplied = diagonal, 0

    def solve(self, vector: Tensor) -> Tensor:
        return vector / self.diagonal

    def multiply(self, vector: Tensor) -> Tensor:
        self.multiplied += 1
        return vector * self.diagonal


MADE_BY: list[Callable[[Tensor], Metric]] = [Diagonal]  # D, in the next `build`


@pytest.fixture(scope="module", params=[Diagonal, Dear], autouse=True)
def metric(request: pytest.FixtureRequest) -> None:
    """Everything below holds for both."""
    MADE_BY[:] = [request.param]


def build(
    H: Tensor, D: Tensor, g: Tensor, previous: list[Tensor], dimension: int
) -> tuple[Subspace, int]:
    """The subspace of dense H and diagonal D [n], and how many products it took."""
    products = 0

    def product(v: Tensor) -> Tensor:
        nonlocal products
        products += 1
        return H @ v

    return krylov_basis(product, MADE_BY[0](D), g, list(previous), dimension), products


def outside(subspace: Subspace, vector: Tensor) -> float:
    """The part of a vector outside the span, relative to the vector."""
    # Rows have lengths of their own: by QR, with each of them made 1 before.
    Q = torch.linalg.qr(torch.nn.functional.normalize(subspace.basis.double()).t()).Q
    v = vector.double()
    return float((v - Q @ (Q.t() @ v)).norm() / v.norm())


def gram_error(subspace: Subspace, D: Tensor) -> float:
    """How far VᵀDV is from 1."""
    V = subspace.basis.double()
    return float(((V * D) @ V.t() - torch.eye(subspace.rank, dtype=torch.float64)).abs().max())


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


SPECTRA = {
    "positive": torch.linspace(0.5, 10, 30),
    "indefinite": torch.linspace(-4, 6, 30),
    "negative": torch.linspace(-9, -0.5, 30),
}
N = 30
G = numbers(N, seed=1)
D_PREV = numbers(N, seed=2)
PREVIOUS = [[], [D_PREV], [D_PREV, numbers(N, seed=4), numbers(N, seed=5)]]
ONES = torch.ones(N, dtype=torch.float64)
DIAGONAL = 0.1 + numbers(N, seed=3).square()


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
    make: Callable[[int], Tensor], dimension: int, dtype: torch.dtype
) -> None:
    H = symmetric(make(200)).to(dtype)
    D = (0.01 + numbers(200, seed=3).square()).to(dtype)
    g, d_prev = numbers(200, seed=1).to(dtype), numbers(200, seed=2).to(dtype)
    subspace, _ = build(H, D, g, [d_prev], dimension)
    assert subspace.basis.dtype == dtype
    assert gram_error(subspace, D) < (1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("D", [ONES, DIAGONAL], ids=["identity", "diagonal"])
def test_span_is_the_preconditioned_krylov_space(spectrum: str, D: Tensor) -> None:
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
def test_curvature_is_the_dense_projection(spectrum: str, previous: list[Tensor]) -> None:
    H = symmetric(SPECTRA[spectrum])
    subspace, _ = build(H, DIAGONAL, G, previous, 7)
    assert subspace.rank == 7 + len(previous)
    V = subspace.basis
    torch.testing.assert_close(subspace.curvature, V @ H @ V.t(), rtol=0, atol=1e-12)
    assert torch.equal(subspace.curvature, subspace.curvature.t())


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_ritz_values_are_those_of_the_papers_orthonormal_basis(spectrum: str) -> None:
    H = symmetric(SPECTRA[spectrum])
    subspace, _ = build(H, DIAGONAL, G, PREVIOUS[2], 6)
    torch.testing.assert_close(subspace.gram, subspace.basis @ subspace.basis.t())
    vectors = [G / DIAGONAL]
    for _ in range(5):
        vectors.append(H @ vectors[-1] / DIAGONAL)
    Q = torch.linalg.qr(torch.stack([v / v.norm() for v in vectors + PREVIOUS[2]], 1)).Q
    expected = torch.linalg.eigvalsh(Q.t() @ H @ Q)
    found = Coordinates(subspace.curvature, subspace.gram, 1e-4).ritz_values
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_curvature_is_float64_for_float32_vectors() -> None:
    H = symmetric(SPECTRA["positive"]).float()
    subspace, _ = build(H, ONES.float(), G.float(), [D_PREV.float()], 7)
    V = subspace.basis.double()
    assert subspace.curvature.dtype == torch.float64
    torch.testing.assert_close(subspace.curvature, V @ H.double() @ V.t(), rtol=0, atol=1e-5)


def test_first_vector_is_the_preconditioned_gradient() -> None:
    subspace, _ = build(symmetric(SPECTRA["positive"]), DIAGONAL, G, [D_PREV], 5)
    first = G / DIAGONAL
    torch.testing.assert_close(subspace.basis[0], first / (first * DIAGONAL * first).sum().sqrt())


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("dimension", [1, 2, 12])
def test_previous_step_lies_in_the_span(dimension: int, scale: float) -> None:
    H = symmetric(SPECTRA["indefinite"])
    subspace, products = build(H, DIAGONAL, G, [scale * D_PREV], dimension)
    assert subspace.rank == products == dimension + 1
    assert outside(subspace, D_PREV) < 1e-13
    without, _ = build(H, DIAGONAL, G, [], dimension)
    assert outside(without, D_PREV) > 0.1
    # It only adds: the Krylov part is the same.
    assert torch.equal(subspace.basis[:dimension], without.basis)


def test_of_previous_steps_those_that_add_something_join() -> None:
    H, (first, second, third) = symmetric(SPECTRA["indefinite"]), PREVIOUS[2]
    mixture = first + 2 * second - G / DIAGONAL
    subspace, products = build(H, DIAGONAL, G, [first, 0 * first, second, mixture, third], 4)
    assert subspace.rank == products == 4 + 3
    for step in (first, second, mixture, third):
        assert outside(subspace, step) < 1e-13
    expected, _ = build(H, DIAGONAL, G, [first, second, third], 4)
    torch.testing.assert_close(subspace.basis, expected.basis, rtol=0, atol=1e-13)
    torch.testing.assert_close(subspace.curvature, expected.curvature, rtol=0, atol=1e-12)


def test_the_basis_alone_holds_previous_steps_in_the_end() -> None:
    joining = [step.clone() for step in PREVIOUS[2]]
    krylov_basis(torch.clone, Identity(), G, joining, 2)
    assert joining == []


def test_gradient_and_previous_step_are_not_written_to() -> None:
    g, d_prev = G.clone(), D_PREV.clone()
    build(symmetric(SPECTRA["positive"]), ONES, g, [d_prev], 5)
    assert torch.equal(g, G)
    assert torch.equal(d_prev, D_PREV)


def test_combine_and_project_are_the_basis_and_its_transpose() -> None:
    subspace, _ = build(symmetric(SPECTRA["positive"]), ONES, G, [D_PREV], 4)
    c, v = numbers(5, seed=5), numbers(N, seed=6)
    torch.testing.assert_close(subspace.combine(c), subspace.basis.t() @ c)
    torch.testing.assert_close(subspace.project(v), subspace.basis @ v)
    torch.testing.assert_close(subspace.project(subspace.combine(c)), c)


def test_combine_and_project_keep_vectors_in_their_dtype_and_small_ones_in_float64() -> None:
    H = symmetric(SPECTRA["positive"]).float()
    subspace, _ = build(H, ONES.float(), G.float(), [], 4)
    assert subspace.combine(numbers(4)).dtype == torch.float32
    assert subspace.project(G.float()).dtype == torch.float64


def test_a_matrix_is_multiplied_with_twice_for_each_previous_step() -> None:
    H, g = symmetric(SPECTRA["indefinite"]), G
    D = Dear(DIAGONAL)
    found = krylov_basis(lambda v: H @ v, D, g, [D_PREV, numbers(N, seed=4)], 8)
    assert D.multiplied == 4
    expected = krylov_basis(lambda v: H @ v, Diagonal(DIAGONAL), g, [D_PREV, numbers(N, seed=4)], 8)
    torch.testing.assert_close(found.basis, expected.basis, rtol=1e-9, atol=1e-9)


# Breakdown -------------------------------------------------------------------------------


def low_rank(rank: int) -> Tensor:
    return symmetric(torch.cat([torch.linspace(1, 3, rank), torch.zeros(N - rank)]))


# (H, D, g, the dimension at which the Krylov space is exhausted).
BREAKDOWNS: dict[str, tuple[Tensor, Tensor, Tensor, int]] = {
    # A perfect preconditioner: D⁻¹H = I.
    "D equals H": (torch.diag(DIAGONAL), DIAGONAL, G, 1),
    "no curvature": (torch.zeros(N, N, dtype=torch.float64), ONES, G, 1),
    "two eigenvalues": (
        symmetric(torch.cat([torch.ones(12), torch.full((18,), 5.0)])),
        ONES,
        G,
        2,
    ),
    # g, and then the range of H.
    "low rank": (low_rank(3), ONES, G, 4),
    "low rank, g in its range": (low_rank(3), ONES, low_rank(3) @ G, 3),
    "g is an eigenvector": (torch.diag(DIAGONAL), ONES, torch.eye(N, dtype=torch.float64)[4], 1),
}


@pytest.mark.parametrize("case", BREAKDOWNS)
@pytest.mark.parametrize("previous", PREVIOUS, ids=len)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_breakdown_cuts_the_rank_and_keeps_previous_steps(
    case: str, previous: list[Tensor], dtype: torch.dtype
) -> None:
    H, D, g, exhausted = BREAKDOWNS[case]
    joining = [step.to(dtype) for step in previous]
    subspace, products = build(H.to(dtype), D.to(dtype), g.to(dtype), joining, 10)

    rank = exhausted + len(previous)
    assert subspace.rank == rank
    assert subspace.basis.shape == (rank, N)
    assert subspace.curvature.shape == (rank, rank)
    assert products == rank  # none is spent on a direction that is not there
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert gram_error(subspace, D) < tolerance
    V = subspace.basis.double()
    expected = V @ H @ V.t()
    torch.testing.assert_close(subspace.curvature, expected, rtol=0, atol=10 * tolerance)
    assert outside(subspace, g / D) < tolerance
    for step in previous:
        assert outside(subspace, step) < tolerance


@pytest.mark.parametrize("which", ["g", "the last Krylov vector", "a mixture"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_previous_step_inside_the_span_is_left_out(which: str, dtype: torch.dtype) -> None:
    H, g = symmetric(SPECTRA["positive"]).to(dtype), G.to(dtype)
    ones = ONES.to(dtype)
    without, _ = build(H, ones, g, [], 5)
    inside = {
        "g": -3 * g,
        "the last Krylov vector": without.basis[4],
        "a mixture": without.combine(numbers(5, seed=4)),
    }[which]
    subspace, products = build(H, ones, g, [inside], 5)
    assert subspace.rank == products == 5
    assert torch.equal(subspace.basis, without.basis)


@pytest.mark.parametrize("D", [ONES, DIAGONAL], ids=["identity", "diagonal"])
def test_previous_step_nearly_inside_the_span_still_joins(D: Tensor) -> None:
    H = symmetric(SPECTRA["positive"])
    without, _ = build(H, D, G, [], 5)
    almost = without.combine(numbers(5, seed=4)) + 1e-9 * D_PREV
    subspace, _ = build(H, D, G, [almost], 5)
    assert subspace.rank == 6
    assert gram_error(subspace, D) < 1e-12
    assert outside(subspace, D_PREV) < 1e-5


def test_previous_step_of_zeros_adds_nothing() -> None:
    subspace, _ = build(symmetric(SPECTRA["positive"]), ONES, G, [0 * D_PREV], 5)
    assert subspace.rank == 5
    assert bool(subspace.basis.isfinite().all())


@given(
    n=st.integers(1, 12),
    dimension=st.integers(1, 15),
    rank=st.integers(0, 3),
    sign=st.sampled_from([1.0, -1.0]),
    later_step=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_any_shape_gives_an_orthonormal_basis_of_the_right_rank(
    n: int, dimension: int, rank: int, sign: float, later_step: bool, seed: int
) -> None:
    rank = min(rank, n)
    # Eigenvalues few and well apart, all of them equally in g: the Krylov space ends where it
    # must, and rounding does not hide it.
    eigenvalues = torch.cat([sign * torch.arange(1.0, rank + 1), torch.zeros(n - rank)])
    ones = torch.ones(n, dtype=torch.float64)
    H, g, d_prev = symmetric(eigenvalues, seed), eigenbasis(n, seed) @ ones, numbers(n, seed=seed)
    subspace, _ = build(H, ones, g, [d_prev] if later_step else [], dimension)
    krylov = min(dimension, n, rank + 1)
    assert subspace.rank == min(n, krylov + later_step)
    assert gram_error(subspace, ones) < 1e-12
    assert outside(subspace, g) < 1e-12
    if later_step:
        assert outside(subspace, d_prev) < 1e-10
    V = subspace.basis
    torch.testing.assert_close(subspace.curvature, V @ H @ V.t(), rtol=0, atol=1e-10)


# The paper's claim: any damped CG solution is inside ------------------------------------------

LAMBDAS = [0.0, 1e-4, 0.3, 10.0, 1e4]


@pytest.mark.parametrize("damping", LAMBDAS)
@pytest.mark.parametrize("K", [1, 4, 8])
def test_cg_solution_of_every_damping_lies_in_the_subspace(K: int, damping: float) -> None:
    H = symmetric(SPECTRA["positive"])
    d = conjugate_gradients(H + damping * torch.diag(ONES), -G, K)
    subspace, _ = build(H, ONES, G, [], K)
    assert outside(subspace, d) < 1e-10
    smaller, _ = build(H, ONES, G, [], max(1, K - 1))
    assert K == 1 or damping > 1e3 or outside(smaller, d) > 1e-6  # it takes all K


@pytest.mark.parametrize("damping", LAMBDAS)
@pytest.mark.parametrize("K", [1, 4, 8])
def test_preconditioned_cg_solution_lies_in_the_subspace(K: int, damping: float) -> None:
    H = symmetric(SPECTRA["positive"])
    damped = H + damping * torch.diag(DIAGONAL)
    subspace, _ = build(H, DIAGONAL, G, [], K)
    assert outside(subspace, conjugate_gradients(damped, -G, K, DIAGONAL)) < 1e-9
    if damping and K > 1:
        # λD is what is meant: with λI, D-preconditioned CG leaves this subspace.
        other = conjugate_gradients(H + damping * torch.diag(ONES), -G, K, DIAGONAL)
        assert damping < 0.1 or outside(subspace, other) > 1e-4


def test_damped_newton_step_lies_in_the_subspace_when_k_reaches_n() -> None:
    n = 8
    H = symmetric(torch.linspace(-3, 4, n))
    g = numbers(n, seed=1)
    subspace, _ = build(H, torch.ones(n, dtype=torch.float64), g, [], n)
    assert outside(subspace, torch.linalg.solve(H + 5 * torch.eye(n), g)) < 1e-12


# What is not finite --------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", [0, 2, 5])
def test_a_product_that_is_not_finite_shows_in_the_curvature(where: int, bad: float) -> None:
    H = symmetric(SPECTRA["positive"])
    calls = 0

    def product(v: Tensor) -> Tensor:
        nonlocal calls
        result = H @ v
        if calls == where:
            result[3] = bad
        calls += 1
        return result

    subspace = krylov_basis(product, Identity(), G, [D_PREV], 5)
    assert not bool(subspace.curvature.isfinite().all())
