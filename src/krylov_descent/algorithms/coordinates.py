"""Coordinates of a subspace in which the curvature is round.

The further preconditioning of Algorithm 3: the projected curvature H̄ gets floored eigenvalues,
Ĥ = CCᵀ, and V̄ = VC⁻ᵀ. V̄ is never formed; C⁻ᵀ acts on the small vectors. The paper's V is
orthonormal. That of any V that spans the same is VT, with TᵀVᵀVT = 1, and T acts on the small
vectors, too.
"""

from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import Vector
from krylov_descent.runtime.threads import one_thread


class Coordinates:
    """Coordinates a with V̄a = VTC⁻ᵀa, in which the curvature is the identity.

    Computed when they are first asked for.

    Args:
        curvature: H̄ = VᵀHV [r, r], float64, finite; any sign.
        gram: VᵀV [r, r].
        epsilon: eigenvalues are floored to this times the largest.

    If the largest eigenvalue is not positive, the floor is ε·max|λ|; if H̄ is zero, Ĥ = I.
    """

    def __init__(self, curvature: Tensor, gram: Tensor, epsilon: float) -> None:
        self._curvature, self._gram, self._epsilon = curvature, gram, epsilon

    @cached_property
    @one_thread()
    def ritz_values(self) -> Tensor:
        """The eigenvalues of H̄ in an orthonormal basis, ascending, before they are floored.

        If none is, the coordinates are known before these: ask for them when there is time.
        """
        values: Tensor = torch.linalg.eigvalsh(self._orthonormal_curvature())
        return values

    def find(self) -> None:
        """Ask for them now."""
        _ = self._found

    @np.errstate(over="ignore", invalid="ignore")  # what is not finite is found by the search
    def to_basis(self, a: Vector) -> Vector:
        """TC⁻ᵀ a: the coefficients of V for the coordinates a."""
        if "_found" not in vars(self) and not a.any():
            return np.zeros_like(a)  # in any coordinates
        return self._found.T @ a

    @np.errstate(over="ignore", invalid="ignore")
    def from_gradient(self, projected: Vector) -> Vector:
        """C⁻¹Tᵀ(Vᵀ∇f): the gradient in the coordinates a."""
        return self._found @ projected

    @cached_property
    @one_thread()
    def _found(self) -> Vector:
        """C⁻¹Tᵀ.

        The inverse itself: it is applied twice per evaluation, where a triangular solve takes ten
        times as long as a product, and the floor bounds its condition number.
        """
        # All by torch, and in few operations, of which each costs more than its arithmetic. NumPy
        # is no faster for 20 rows; from 40 on it wakes threads of its own, whatever torch was told.
        known = self._without_floor()
        return (self._with_floor() if known is None else known).numpy()

    def _without_floor(self) -> Tensor | None:
        """The same if no eigenvalue λ is seen to be floored, as nearly always; else None.

        Then Ĥ is H̄, and H̄ = FFᵀ = T⁻ᵀ(CCᵀ)T⁻¹, so that F⁻¹ is C⁻¹Tᵀ. No λ has to be known for
        that, which takes longer than all the rest.
        """
        factor, failed_at = torch.linalg.cholesky_ex(self._curvature)
        if failed_at:
            return None
        found = torch.linalg.solve_triangular(factor, _identity(len(factor)), upper=False)
        of_gram, transposed = self._orthonormal
        # √Σλ and √Σ(1/λ), of which the product is at least the root of the largest over the least.
        bound = _norm(transposed @ factor) * _norm(found @ of_gram)
        return found if self._epsilon * bound * bound <= 1 else None

    def _with_floor(self) -> Tensor:
        """The same with eigenvalues that are found and floored."""
        self.ritz_values, vectors = torch.linalg.eigh(self._orthonormal_curvature())
        ascending = self.ritz_values.tolist()
        largest, size = ascending[-1], max(-ascending[0], ascending[-1])
        # An eigenvalue of zero is found as rounding of either sign, which must not set the floor.
        # H̄ is in float64, but of products that were rounded as vectors are.
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
        """Of eigenvalues whose size is 1."""
        return len(self._gram) * torch.finfo(self._gram.dtype).eps


def subspace_is_known(gram: Tensor) -> bool:
    """Whether there are vectors, all of a finite length that is not zero, given VᵀV."""
    lengths = gram.numpy().diagonal()
    return bool(lengths.size) and bool((np.isfinite(lengths) & (lengths > 0)).all())


def _orthonormalizing(gram: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """T⁻ᵀ and Tᵀ [r, r], lower triangular, with TᵀGT = 1, for the Gram matrix G of vectors.

    Args:
        gram: G [r, r], float64.
        rounding: of its eigenvalues, were all lengths 1.
    """
    found: Tensor
    factor, failed_at = torch.linalg.cholesky_ex(gram)
    if not failed_at:
        found = torch.linalg.solve_triangular(factor, _identity(len(gram)), upper=False)
        # The inverse of the factor, were all lengths 1. Its squares add up to Σ 1/λ, which shows,
        # as nearly always, that no eigenvalue is below the rounding. So they need not be found.
        size = _norm(found * gram.diagonal().sqrt())
        if size * size * rounding <= 1:
            return factor, found
    lengths = gram.diagonal().sqrt()
    values, vectors = torch.linalg.eigh(gram / lengths.outer(lengths))
    # Below is rounding. Vectors that are orthonormal in a D of condition c have none below 1/c.
    values = values.clamp(min=rounding)
    factor = torch.linalg.cholesky((vectors * values) @ vectors.t())
    found = torch.linalg.solve_triangular(factor, torch.diag(1 / lengths), upper=False)
    return lengths.unsqueeze(1) * factor, found


def _norm(matrix: Tensor) -> float:
    """The root of the sum of its squares."""
    return float(np.linalg.norm(matrix.numpy()))


@cache
def _identity(rows: int) -> Tensor:
    return torch.eye(rows, dtype=torch.float64)
