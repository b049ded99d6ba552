"""Coordinates of a subspace in which the curvature is the identity.

This is the further preconditioning of Algorithm 3. The eigenvalues of the projected curvature H̄
are floored, which gives Ĥ = CCᵀ, and V̄ = VC⁻ᵀ. V̄ is never formed; C⁻ᵀ acts on the small vectors.
The paper's V is orthonormal. For any V with the same span, VT is orthonormal if TᵀVᵀVT = 1. T acts
on the small vectors, too.
"""

from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import Vector
from krylov_descent.runtime.threads import one_thread


class Coordinates:
    """Coordinates a with V̄a = VTC⁻ᵀa, in which the curvature is the identity.

    Computed on first use.

    Args:
        curvature: H̄ = VᵀHV [r, r], float64, finite; any sign.
        gram: VᵀV [r, r].
        epsilon: the floor on eigenvalues relative to the largest eigenvalue.

    If the largest eigenvalue is not positive, the floor is ε·max|λ|. If H̄ is zero, Ĥ = I.
    """

    def __init__(self, curvature: Tensor, gram: Tensor, epsilon: float) -> None:
        self._curvature, self._gram, self._epsilon = curvature, gram, epsilon

    @cached_property
    @one_thread()
    def ritz_values(self) -> Tensor:
        """The eigenvalues of H̄ in an orthonormal basis [r], ascending, before they are floored.

        If none is floored, the coordinates are computed without them. Then the first reading costs
        an eigendecomposition, so read them when there is time.
        """
        values: Tensor = torch.linalg.eigvalsh(self._orthonormal_curvature())
        return values

    def find(self) -> None:
        """Compute the coordinates now."""
        _ = self._found

    @np.errstate(over="ignore", invalid="ignore")  # the search checks for inf and NaN
    def to_basis(self, a: Vector) -> Vector:
        """TC⁻ᵀ a [r]: the coefficients of V for the coordinates a."""
        if "_found" not in vars(self) and not a.any():
            return np.zeros_like(a)  # zero in all coordinates
        return self._found.T @ a

    @np.errstate(over="ignore", invalid="ignore")
    def from_gradient(self, projected: Vector) -> Vector:
        """C⁻¹Tᵀ(Vᵀ∇f) [r]: the gradient in the coordinates a."""
        return self._found @ projected

    @cached_property
    @one_thread()
    def _found(self) -> Vector:
        """C⁻¹Tᵀ [r, r].

        The explicit inverse, because it is applied twice per evaluation, and a triangular solve
        takes ten times as long as a product. The floor bounds its condition number.
        """
        # In few operations, because each costs more than its arithmetic. By torch, because NumPy is
        # no faster for 20 rows, and from 40 rows on it starts threads of its own.
        known = self._without_floor()
        return (self._with_floor() if known is None else known).numpy()

    def _without_floor(self) -> Tensor | None:
        """C⁻¹Tᵀ if no eigenvalue λ is seen to need the floor, which is nearly always; else None.

        Then Ĥ is H̄, and H̄ = FFᵀ = T⁻ᵀ(CCᵀ)T⁻¹, so that F⁻¹ is C⁻¹Tᵀ. This needs no eigenvalues,
        whose computation takes longer than everything else.
        """
        factor, failed_at = torch.linalg.cholesky_ex(self._curvature)
        if failed_at:
            return None
        found = torch.linalg.solve_triangular(factor, _identity(len(factor)), upper=False)
        of_gram, transposed = self._orthonormal
        # √Σλ times √Σ(1/λ), which is at least the root of the largest λ over the least.
        bound = _norm(transposed @ factor) * _norm(found @ of_gram)
        return found if self._epsilon * bound * bound <= 1 else None

    def _with_floor(self) -> Tensor:
        """C⁻¹Tᵀ with floored eigenvalues."""
        self.ritz_values, vectors = torch.linalg.eigh(self._orthonormal_curvature())
        ascending = self.ritz_values.tolist()
        largest, size = ascending[-1], max(-ascending[0], ascending[-1])
        # Rounding turns an eigenvalue of zero into a tiny one of either sign, which must not set
        # the floor. H̄ is in float64, but made of products with the rounding of the vectors' dtype.
        scale = largest if largest > self._rounding * size else size
        if scale == 0:
            floored = torch.ones_like(self.ritz_values)
        else:
            floored = self.ritz_values.clamp(min=self._epsilon * scale)
        factor = torch.linalg.cholesky((vectors * floored) @ vectors.t())
        _, transposed = self._orthonormal
        found: Tensor = torch.linalg.solve_triangular(factor, transposed, upper=False)
        return found

    def _orthonormal_curvature(self) -> Tensor:
        """TᵀH̄T [r, r]."""
        _, transposed = self._orthonormal
        return transposed @ self._curvature @ transposed.t()

    @cached_property
    def _orthonormal(self) -> tuple[Tensor, Tensor]:
        """T⁻ᵀ and Tᵀ."""
        return _orthonormalizing(self._gram.double(), self._rounding)

    @property
    def _rounding(self) -> float:
        """The rounding error of eigenvalues of size 1."""
        return len(self._gram) * torch.finfo(self._gram.dtype).eps


def subspace_is_known(gram: Tensor) -> bool:
    """Whether V has vectors, all of finite and positive length, given VᵀV."""
    lengths = gram.numpy().diagonal()
    return bool(lengths.size) and bool((np.isfinite(lengths) & (lengths > 0)).all())


def _orthonormalizing(gram: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """T⁻ᵀ and Tᵀ [r, r], lower triangular, with TᵀGT = 1, for the Gram matrix G of vectors.

    Args:
        gram: G [r, r], float64.
        rounding: the rounding error of the eigenvalues of G for vectors of length 1.
    """
    found: Tensor
    factor, failed_at = torch.linalg.cholesky_ex(gram)
    if not failed_at:
        found = torch.linalg.solve_triangular(factor, _identity(len(gram)), upper=False)
        # The norm of the inverse factor for vectors of length 1. Its square is Σ 1/λ. This nearly
        # always shows that no eigenvalue λ is below the rounding, so that none has to be computed.
        size = _norm(found * gram.diagonal().sqrt())
        if size * size * rounding <= 1:
            return factor, found
    lengths = gram.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(gram / lengths.outer(lengths))
    # Smaller eigenvalues are rounding. Vectors that are orthonormal in a D with condition number c
    # have no eigenvalue below 1/c.
    values = values.clamp(min=rounding)
    factor = torch.linalg.cholesky((vectors * values) @ vectors.t())
    found = torch.linalg.solve_triangular(factor, torch.diag(1 / lengths), upper=False)
    return lengths.unsqueeze(1) * factor, found


def _norm(matrix: Tensor) -> float:
    """The Frobenius norm."""
    return float(np.linalg.norm(matrix.numpy()))


@cache
def _identity(rows: int) -> Tensor:
    return torch.eye(rows, dtype=torch.float64)
