"""Where the Krylov space ends early, and what is not finite: the rank is cut, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from krylov_descent.curvature.preconditioners.preconditioner import Identity
from tests.matrices import eigenbasis, numbers, symmetric
from tests.subspaces import (
    D_PREV,
    DIAGONAL,
    ONES,
    PREVIOUS,
    SPECTRA,
    Build,
    G,
    N,
    basis_in_one_process,
    gram_error,
    outside,
    vectors,
)


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
    build: Build, case: str, previous: list[Tensor], dtype: torch.dtype
) -> None:
    H, D, g, exhausted = BREAKDOWNS[case]
    joining = [step.to(dtype) for step in previous]
    subspace, products = build(H.to(dtype), D.to(dtype), g.to(dtype), joining, 10)

    rank = exhausted + len(previous)
    assert subspace.rank == rank
    assert vectors(subspace).shape == (rank, N)
    assert subspace.curvature.shape == (rank, rank)
    assert products == rank  # none is spent on a direction that is not there
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert gram_error(subspace, D) < tolerance
    V = vectors(subspace).double()
    expected = V @ H @ V.t()
    torch.testing.assert_close(subspace.curvature, expected, rtol=0, atol=10 * tolerance)
    assert outside(subspace, g / D) < tolerance
    for step in previous:
        assert outside(subspace, step) < tolerance


@pytest.mark.parametrize("which", ["g", "the last Krylov vector", "a mixture"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_previous_step_inside_the_span_is_left_out(
    build: Build, which: str, dtype: torch.dtype
) -> None:
    H, g = symmetric(SPECTRA["positive"]).to(dtype), G.to(dtype)
    ones = ONES.to(dtype)
    without, _ = build(H, ones, g, [], 5)
    inside = {
        "g": -3 * g,
        "the last Krylov vector": vectors(without)[4],
        "a mixture": without.combine(numbers(5, seed=4)),
    }[which]
    subspace, products = build(H, ones, g, [inside], 5)
    assert subspace.rank == products == 5
    assert torch.equal(vectors(subspace), vectors(without))


@pytest.mark.parametrize("D", [ONES, DIAGONAL], ids=["identity", "diagonal"])
def test_previous_step_nearly_inside_the_span_still_joins(build: Build, D: Tensor) -> None:
    H = symmetric(SPECTRA["positive"])
    without, _ = build(H, D, G, [], 5)
    almost = without.combine(numbers(5, seed=4)) + 1e-9 * D_PREV
    subspace, _ = build(H, D, G, [almost], 5)
    assert subspace.rank == 6
    assert gram_error(subspace, D) < 1e-12
    assert outside(subspace, D_PREV) < 1e-5


def test_previous_step_of_zeros_adds_nothing(build: Build) -> None:
    subspace, _ = build(symmetric(SPECTRA["positive"]), ONES, G, [0 * D_PREV], 5)
    assert subspace.rank == 5
    assert bool(vectors(subspace).isfinite().all())


@given(
    n=st.integers(1, 12),
    dimension=st.integers(1, 15),
    rank=st.integers(0, 3),
    sign=st.sampled_from([1.0, -1.0]),
    later_step=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_any_shape_gives_an_orthonormal_basis_of_the_right_rank(
    build: Build, n: int, dimension: int, rank: int, sign: float, later_step: bool, seed: int
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
    V = vectors(subspace)
    torch.testing.assert_close(subspace.curvature, V @ H @ V.t(), rtol=0, atol=1e-10)


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

    subspace = basis_in_one_process(product, Identity(), G, [D_PREV], 5)
    assert not bool(subspace.curvature.isfinite().all())
