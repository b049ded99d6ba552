"""How far the quadratic model goes down in the first directions of a Krylov space."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Relative to the largest eigenvalue: below this an eigenvalue is rounding.
ROUNDING = 1e-12


def model_decreases(curvature: Tensor, squared_length: float) -> NDArray[np.float64]:
    """The decrease of gᵀs + ½sᵀHs by its minimum in the first k directions, for each k; [K].

    In the inner product of D only the first direction has a part of g, of length b. So the decrease
    is ½b² times the first entry of H̄_k⁻¹, with H̄_k the leading part of H̄. With H̄ = LLᵀ that entry
    is the sum of the first k squares of L⁻¹e₁.

    Args:
        curvature: H̄ between the directions [K, K], float64, symmetric and finite. If it is not
            positive definite, a multiple of the identity is added.
        squared_length: b² = gᵀD⁻¹g.
    """
    factor, failed_at = torch.linalg.cholesky_ex(curvature)
    if failed_at:
        values = torch.linalg.eigvalsh(curvature)
        size = float(values.abs().max()) or 1.0
        shift = 2 * ROUNDING * size - min(0.0, float(values[0]))
        factor = torch.linalg.cholesky(curvature + shift * torch.eye(len(curvature)).double())
    first = torch.zeros(len(curvature), 1, dtype=torch.float64)
    first[0] = 1
    column = torch.linalg.solve_triangular(factor, first, upper=False)
    found: NDArray[np.float64] = 0.5 * squared_length * column.numpy()[:, 0] ** 2
    return found.cumsum()
