"""Directions of the damped Gauss-Newton system, for fewer residuals than parameters.

For residuals r [m] with Jacobian J [m, n], the step of Levenberg and Marquardt with damping λ is

    d_λ = −Jᵀ(JJᵀ + λ‖JJᵀ‖₁)⁻¹r

Which λ is best is not asked: the directions of several, each four times the next, span a subspace.
Where m < n the step without damping meets all residuals at once, and a little damping keeps it from
going far along directions that hardly change them.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# The factor between two dampings, how many there are, and the least, in units of rounding.
FACTOR, COUNT, LEAST_UNITS = 4.0, 12, 4.0
# Smaller eigenvalues of JJᵀ do not count, relative to the largest.
NEGLIGIBLE = 1e-12
# Combinations of the directions with a smaller squared length are left out, in units of rounding.
INDEPENDENT_UNITS = 500.0


class DampedDirections(NamedTuple):
    """A basis of the subspace of damped directions.

    Attributes:
        rows: V, orthonormal [r, n], r ≤ `COUNT`.
        dampings: λ of each direction [k].
        overlaps: the products of the directions, scaled to length 1, with the rows [k, r].
    """

    rows: Tensor
    dampings: NDArray[np.float64]
    overlaps: NDArray[np.float64]

    def best_damping(self, coefficients: NDArray[np.float64]) -> float:
        """λ of the direction with the largest component of a step.

        Args:
            coefficients: of the rows [r].
        """
        return float(self.dampings[int(np.argmax(self.overlaps @ coefficients))])


def damped_directions(matrix: Tensor, residuals: Tensor, centre: float) -> DampedDirections:
    """The subspace of damped directions around a damping.

    Args:
        matrix: J [m, n].
        residuals: r [m], not zero.
        centre: the damping in the middle.

    Cost: m²n + COUNT·m³/6 multiplications, and 3m² numbers.
    """
    system = matrix @ matrix.t()
    size = torch.linalg.matrix_norm(system, 1)
    dampings = _dampings(centre, matrix.dtype)
    # One after another: a GPU factorises a batch of large matrices several times as slowly.
    solutions, failures = list[Tensor](), list[Tensor]()
    for damping in dampings:
        damped = system.clone()
        damped.diagonal().add_(damping * size)
        factor, failed = torch.linalg.cholesky_ex(damped)
        solutions.append(torch.cholesky_solve(residuals[:, None], factor)[:, 0])
        failures.append(failed)
    directions = torch.stack(solutions) @ matrix
    lengths = directions.norm(dim=1)
    known = (torch.stack(failures) == 0) & lengths.isfinite() & (lengths > 0)
    directions = -directions[known] / lengths[known, None]
    return _with_basis(directions, np.array(dampings)[known.cpu().numpy()])


def independent_residuals(matrix: Tensor) -> int:
    """How many eigenvalues of JJᵀ count, for J [m, n]: so many directions change all residuals.

    Cost: m²n + 4m³/3 multiplications.
    """
    system = matrix @ matrix.t()
    if not bool(system.isfinite().all()):
        return 0
    values = torch.linalg.eigvalsh(system)
    return int((values > NEGLIGIBLE * values[-1]).sum())


def least_damping(dtype: torch.dtype) -> float:
    """Smaller dampings are below the rounding of the system."""
    return LEAST_UNITS * torch.finfo(dtype).eps


def _dampings(centre: float, dtype: torch.dtype) -> list[float]:
    powers = range(-(COUNT // 2), COUNT - COUNT // 2)
    wanted = (centre * FACTOR**power for power in powers)
    return [damping for damping in wanted if damping >= least_damping(dtype) / 10]


def _with_basis(directions: Tensor, dampings: NDArray[np.float64]) -> DampedDirections:
    """An orthonormal basis of the span of directions [k, n] of length 1."""
    gram = (directions @ directions.t()).double().cpu()
    values, vectors = torch.linalg.eigh(gram)
    kept = values > INDEPENDENT_UNITS * torch.finfo(directions.dtype).eps * len(values)
    combinations = (vectors[:, kept] / values[kept].sqrt()).t()
    rows = combinations.to(directions) @ directions
    return DampedDirections(rows, dampings, (gram @ combinations.t()).numpy())
