"""The shortest vector of a convex hull: against SciPy, and by the property that defines it."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import nnls

from krylov_descent.algorithms.bundle import hull_weights_from, shortest_in_hull


def random_vectors(seed: int) -> NDArray[np.float64]:
    """Of lengths that differ by up to a million, around a centre that may be far from zero."""
    generator = np.random.default_rng(seed)
    count, size = generator.integers(1, 14), generator.integers(1, 24)
    lengths = 10 ** generator.uniform(-3, 3, (count, 1))
    centre = generator.standard_normal(size) * generator.choice([0.0, 1.0, 5.0])
    vectors: NDArray[np.float64] = generator.standard_normal((count, size)) * lengths + centre
    if seed % 3 == 0:
        vectors[generator.integers(count)] = vectors[generator.integers(count)]
    return vectors


@pytest.mark.parametrize("seed", range(60))
def test_it_is_as_short_as_scipys(seed: int) -> None:
    vectors = random_vectors(seed)
    scale = np.abs(vectors).max()
    matrix = np.vstack([vectors.T / scale, np.ones(len(vectors))])
    weights, _ = nnls(matrix, np.r_[np.zeros(vectors.shape[1]), 1.0], maxiter=1000)
    shortest = np.linalg.norm(weights / weights.sum() @ vectors)
    found = np.linalg.norm(shortest_in_hull(vectors))
    assert found == pytest.approx(shortest, abs=1e-13 * scale)


@pytest.mark.parametrize("seed", range(60))
def test_its_negative_descends_along_every_gradient(seed: int) -> None:
    """gᵀp ≥ ‖p‖² for all of them, which no other vector of the hull has."""
    vectors = random_vectors(seed)
    found = shortest_in_hull(vectors)
    scale = float((vectors**2).sum(1).max())
    assert (vectors @ found >= found @ found - 1e-12 * scale).all()


def test_simple_hulls() -> None:
    one = np.array([[3.0, -4.0]])
    np.testing.assert_array_equal(shortest_in_hull(one), one[0])
    # Opposite slopes of |x| + y: the kink's direction remains.
    np.testing.assert_allclose(
        shortest_in_hull(np.array([[1.0, 1.0], [-2.0, 1.0]])), [0.0, 1.0], atol=1e-15
    )
    # Zero is inside: the point is stationary.
    around = np.array([[1.0, 0.0], [-1.0, 1.0], [-1.0, -1.0]])
    np.testing.assert_allclose(shortest_in_hull(around), 0.0, atol=1e-15)
    # The nearest corner.
    np.testing.assert_allclose(shortest_in_hull(np.array([[1.0, 1.0], [2.0, 5.0]])), [1.0, 1.0])
    np.testing.assert_array_equal(shortest_in_hull(np.zeros((3, 2))), [0.0, 0.0])


@pytest.mark.parametrize("seed", range(20))
def test_inner_products_are_enough(seed: int) -> None:
    """To half of the digits: they are squares."""
    vectors = random_vectors(seed)
    found = hull_weights_from(vectors @ vectors.T) @ vectors
    scale = np.abs(vectors).max()
    expected = np.linalg.norm(shortest_in_hull(vectors))
    assert np.linalg.norm(found) == pytest.approx(expected, abs=1e-6 * scale)
