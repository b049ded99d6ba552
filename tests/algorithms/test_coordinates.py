"""The coordinates of a subspace against NumPy: V̄ᵀĤV̄ = I for curvature of any sign.

Algorithm 3, lines 7 to 9: eigenvalues floored to ε times the largest, Ĥ = CCᵀ, V̄ = VC⁻ᵀ.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from krylov_descent.algorithms.coordinates import Coordinates
from tests.matrices import numbers, symmetric


def floored_by_numpy(curvature: Tensor, epsilon: float) -> np.ndarray:
    """Ĥ, formed: Algorithm 3, line 7."""
    values, vectors = np.linalg.eigh(curvature.numpy())
    if not values.any():
        return np.eye(len(values))
    positive = values.max() > 1e-12 * np.abs(values).max()  # not a zero with its rounding
    scale = values.max() if positive else np.abs(values).max()
    result: np.ndarray = vectors @ np.diag(np.maximum(values, epsilon * scale)) @ vectors.T
    return result


def inverse_transposed_factor(coordinates: Coordinates, rank: int) -> Tensor:
    """C⁻ᵀ, column by column."""
    columns = [coordinates.to_basis(row) for row in np.eye(rank)]
    return torch.from_numpy(np.stack(columns, axis=1))


def coordinates_of(curvature: Tensor, epsilon: float) -> Coordinates:
    """For orthonormal vectors."""
    return Coordinates(curvature, torch.eye(len(curvature), dtype=torch.float64), epsilon)


def check_coordinates(curvature: Tensor, epsilon: float, tolerance: float = 1e-9) -> None:
    rank = len(curvature)
    coordinates = coordinates_of(curvature, epsilon)
    V_bar = inverse_transposed_factor(coordinates, rank).numpy()
    # V̄ᵀĤV̄ = I.
    identity = V_bar.T @ floored_by_numpy(curvature, epsilon) @ V_bar
    np.testing.assert_allclose(identity, np.eye(rank), rtol=0, atol=tolerance)
    # The gradient in the coordinates is V̄ᵀ times the gradient in the basis.
    gradient = numbers(rank, seed=9).numpy()
    expected = V_bar.T @ gradient
    found = coordinates.from_gradient(gradient)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize(
    "eigenvalues",
    [
        [1.0, 2.0, 5.0],
        [1e-9, 1.0, 5.0],  # floored
        [0.0, 0.0, 5.0],
        [-3.0, 0.01, 5.0],  # indefinite
        [-300.0, -1.0, 1e-3],  # the largest decides, not the largest in size
        [-3.0, -2.0, -1.0],  # negative definite
        [-3.0, 0.0, 0.0],  # the largest is zero, the matrix is not
        [0.0, 0.0, 0.0],
        [7.0],
        [-7.0],
        [0.0],
        [1e-200, 1e-201],
        [1e200, 1e190],
    ],
    ids=str,
)
@pytest.mark.parametrize("epsilon", [1e-4, 1e-2])
def test_curvature_is_the_identity_in_the_coordinates(
    eigenvalues: list[float], epsilon: float
) -> None:
    check_coordinates(symmetric(torch.tensor(eigenvalues, dtype=torch.float64)), epsilon)


@pytest.mark.parametrize(
    ("eigenvalues", "floored"),
    [
        ([1e-9, 1.0, 4.0], [4e-4, 1.0, 4.0]),
        ([-50.0, 1.0, 4.0], [4e-4, 1.0, 4.0]),
        ([-4.0, -3.0, -1.0], [4e-4, 4e-4, 4e-4]),
        ([-4.0, -3.0, 0.0], [4e-4, 4e-4, 4e-4]),
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0]),
    ],
)
def test_eigenvalues_are_floored_to_epsilon_times_the_largest(
    eigenvalues: list[float], floored: list[float]
) -> None:
    H = torch.diag(torch.tensor(eigenvalues, dtype=torch.float64))
    coordinates = coordinates_of(H, 1e-4)
    # A diagonal Ĥ has C = √Ĥ, so C⁻ᵀ must be 1/√λ.
    factor = inverse_transposed_factor(coordinates, 3)
    expected = torch.diag(torch.tensor(floored, dtype=torch.float64) ** -0.5)
    torch.testing.assert_close(factor, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("part_of_floor", [0.5, 0.99, 1.01, 2.0, 10.0, 100.0])
def test_near_the_floor_it_does_not_matter_how_coordinates_are_found(part_of_floor: float) -> None:
    """By eigenvalues, or without them where it is seen that none is floored."""
    eigenvalues = [part_of_floor * 1e-4 * 5.0, 1.0, 2.0, 5.0]
    check_coordinates(symmetric(torch.tensor(eigenvalues, dtype=torch.float64)), 1e-4)


def test_eigenvalues_are_found_later_where_none_is_floored(monkeypatch: pytest.MonkeyPatch) -> None:
    eigenvalues = torch.tensor([0.01, 2.0, 5.0], dtype=torch.float64)
    coordinates = coordinates_of(symmetric(eigenvalues), 1e-4)
    with monkeypatch.context() as patched:
        for name in ("eigh", "eigvalsh"):
            patched.delattr(torch.linalg, name)
        coordinates.find()
    torch.testing.assert_close(coordinates.ritz_values, eigenvalues, rtol=0, atol=1e-13)


@pytest.mark.parametrize("seed", range(8))
def test_rounding_of_a_zero_eigenvalue_does_not_set_the_floor(seed: int) -> None:
    negative = symmetric(torch.tensor([-4.0, 0.0, 0.0]), seed)
    factor = inverse_transposed_factor(coordinates_of((negative + negative.t()) / 2, 1e-4), 3)
    # Ĥ = 4e-4·I whatever the eigenbasis.
    torch.testing.assert_close(factor @ factor.t(), torch.eye(3).double() / 4e-4)


def test_rounding_is_that_of_the_vectors() -> None:
    curvature, rounding = torch.diag(torch.tensor([-4.0, 1e-9, 0.0])).double(), torch.float32
    coordinates = Coordinates(curvature, torch.eye(3, dtype=rounding), 1e-4)
    factor = inverse_transposed_factor(coordinates, 3)
    torch.testing.assert_close(factor @ factor.t(), torch.eye(3).double() / 4e-4)
    # In float64 it is an eigenvalue, and the largest.
    known = inverse_transposed_factor(coordinates_of(curvature, 1e-4), 3)
    torch.testing.assert_close(
        known @ known.t(), torch.diag(torch.tensor([1e13, 1e9, 1e13])).double()
    )


def test_the_start_is_known_before_the_coordinates_are() -> None:
    zero = np.zeros(3)
    unknown = coordinates_of(torch.full((3, 3), torch.nan).double(), 1e-4)
    assert np.array_equal(unknown.to_basis(zero), zero)
    with pytest.raises(RuntimeError, match="linalg"):
        unknown.to_basis(zero + 1)


def test_ritz_values_are_the_eigenvalues_before_flooring() -> None:
    eigenvalues = torch.tensor([-3.0, 1e-9, 2.0], dtype=torch.float64)
    found = coordinates_of(symmetric(eigenvalues), 1e-4).ritz_values
    torch.testing.assert_close(found, eigenvalues, rtol=0, atol=1e-13)


@pytest.mark.parametrize("eigenvalues", [[1e-9, 0.3, 2.0, 5.0], [-3.0, -1e-3, 0.1, 4.0]], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_other_vectors_of_the_same_span_have_the_same_coordinates(
    eigenvalues: list[float], scale: float
) -> None:
    """But for a rotation, of which a search takes no notice: V̄V̄ᵀ is the same matrix."""
    H = symmetric(torch.tensor(eigenvalues, dtype=torch.float64))
    mix = scale * (torch.eye(4) + 0.3 * numbers(4, 4, seed=3)) * torch.tensor([1.0, 10.0, 0.1, 3.0])
    plain, other = coordinates_of(H, 1e-4), Coordinates(mix @ H @ mix.t(), mix @ mix.t(), 1e-4)
    torch.testing.assert_close(other.ritz_values, plain.ritz_values, rtol=1e-9, atol=1e-12)
    expected = inverse_transposed_factor(plain, 4)
    found = mix.t() @ inverse_transposed_factor(other, 4)
    torch.testing.assert_close(found @ found.t(), expected @ expected.t(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("apart", [1.0, 1e-2, 1e-3, 1e-5, 0.0])
def test_vectors_that_rounding_makes_dependent_count_as_apart_by_it(
    dtype: torch.dtype, apart: float
) -> None:
    """Two of four vectors of other lengths, which are nearly or exactly the same direction."""
    vectors = numbers(4, 6, seed=4)
    vectors[3] = vectors[2] + apart * vectors[3]
    vectors *= torch.tensor([1.0, 1e3, 1e-3, 1e2]).unsqueeze(1)
    gram = (vectors @ vectors.t()).to(dtype)
    H = symmetric(torch.tensor([1e-9, 0.3, 2.0, 5.0], dtype=torch.float64))
    found = inverse_transposed_factor(Coordinates(H, gram, 1e-4), 4).numpy()
    # By NumPy: T with TᵀGT = 1, of a normalised G whose eigenvalues are not below rounding.
    lengths = np.sqrt(gram.double().numpy().diagonal())
    values, columns = np.linalg.eigh(gram.double().numpy() / np.outer(lengths, lengths))
    raised = (columns * np.maximum(values, 4 * torch.finfo(dtype).eps)) @ columns.T
    T = np.linalg.inv(np.linalg.cholesky(raised)).T / lengths[:, np.newaxis]
    C = np.linalg.cholesky(floored_by_numpy(torch.from_numpy(T.T @ H.numpy() @ T), 1e-4))
    expected = T @ np.linalg.inv(C).T
    error = np.abs((found - expected) * lengths[:, np.newaxis]).max()
    # With what was raised from zero, rounding of the eigenvectors is all there is.
    tolerance = 1e-6 if dtype is torch.float32 or apart >= 1e-3 else 1e-1
    assert error < tolerance * np.abs(expected * lengths[:, np.newaxis]).max()


@given(
    eigenvalues=st.lists(
        st.one_of(st.just(0.0), st.floats(1e-2, 1e4), st.floats(-1e4, -1e-2)),
        min_size=1,
        max_size=21,
    ),
    epsilon=st.floats(1e-6, 0.5),
    seed=st.integers(0, 1000),
)
def test_any_symmetric_curvature_has_coordinates(
    eigenvalues: list[float], epsilon: float, seed: int
) -> None:
    curvature = symmetric(torch.tensor(eigenvalues, dtype=torch.float64), seed)
    curvature = (curvature + curvature.t()) / 2
    check_coordinates(curvature, epsilon, tolerance=1e-8)
