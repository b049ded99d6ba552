"""A direction of descent at a kink: the shortest vector in the hull of the gradients around it.

Beside a kink, as ReLU nets have them, a function climbs after a tiny step against its gradient,
because the gradient describes one side of the kink only. Let p be the shortest vector in the convex
hull of the gradients gᵢ from both sides. Then gᵢᵀp ≥ ‖p‖² for all i, so −p descends on every side
(Lemaréchal 1975; Wolfe 1975). If p is zero, the point is stationary.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
# A vector with a smaller gain, relative to the scale of the problem, does not shorten p any more.
TOLERANCE = 1e-14


def shortest_in_hull(vectors: Array) -> Array:
    """The shortest vector p = Gᵀλ [d] in the convex hull of the rows of G [m, d]."""
    shortest: Array = vectors.T @ hull_weights(vectors)
    return shortest


def hull_weights_from(products: Array) -> Array:
    """The weights λ [m] of `hull_weights`, from the inner products GGᵀ [m, m] alone."""
    squares, axes = np.linalg.eigh(products)
    return hull_weights(axes * np.sqrt(np.maximum(squares, 0.0)))


def hull_weights(vectors: Array) -> Array:
    """The weights of the shortest vector in the convex hull of the rows of a matrix.

    Args:
        vectors: G [m, d].

    Returns:
        λ [m], with λ ≥ 0 and Σλ = 1.

    Minimising ‖Gᵀλ‖² + (Σλ − 1)² over λ ≥ 0 gives a multiple of these λ: with λ = tμ and Σμ = 1 the
    best t leaves ‖Gᵀμ‖² / (1 + ‖Gᵀμ‖²), which grows with ‖Gᵀμ‖. This least-squares problem with λ ≥
    0 is solved by Lawson and Hanson's active-set method. Cost: about m solutions of size m.
    """
    scale = float(np.abs(vectors).max())
    if scale == 0:
        return np.full(len(vectors), 1 / len(vectors))
    matrix = np.vstack([vectors.T / scale, np.ones(len(vectors))])  # [d + 1, m]
    target = np.zeros(len(matrix))
    target[-1] = 1.0
    weights = np.zeros(len(vectors))
    for _ in range(3 * len(vectors)):
        gain = matrix.T @ (target - matrix @ weights)
        gain[weights > 0] = 0.0
        if gain.max() <= TOLERANCE:
            break
        active = weights > 0
        active[gain.argmax()] = True
        weights = _least_squares(matrix, target, weights, active)
    normalised: Array = weights / weights.sum()
    return normalised


def _least_squares(
    matrix: Array, target: Array, weights: Array, active: NDArray[np.bool_]
) -> Array:
    """The least-squares weights of an active set, from which negative weights are removed."""
    while True:
        wanted = np.zeros_like(weights)
        wanted[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
        negative = active & (wanted <= 0)
        if not negative.any():
            return wanted
        # Move until the first weight becomes zero. This weight leaves the active set.
        parts = weights[negative] / (weights[negative] - wanted[negative])
        weights = weights + parts.min() * (wanted - weights)
        weights[np.flatnonzero(negative)[parts.argmin()]] = 0.0
        active = active & (weights > 0)
