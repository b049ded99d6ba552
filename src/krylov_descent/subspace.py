"""The Krylov subspace, the curvature in it, and coordinates in which it is round.

`krylov_basis` is the paper's Algorithm 2: orthonormal vectors that span
{ (D⁻¹H)ᵏ D⁻¹g, 0 ≤ k < K } and previous steps, with H̄ = VᵀHV on the way. `Coordinates`
is the further preconditioning of Algorithm 3: H̄ with floored eigenvalues, Ĥ = CCᵀ, and
V̄ = VC⁻ᵀ. V̄ is never formed; C⁻ᵀ acts on the small vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from krylov_descent.threads import one_thread

Product = Callable[[Tensor], Tensor]

# Of a new direction, what is left after orthogonalisation counts as nothing below this many
# units of rounding: it would be a random vector.
BREAKDOWN_UNITS = 100.0


@dataclass(frozen=True, slots=True)
class Subspace:
    """Orthonormal vectors and the curvature between them.

    Attributes:
        basis: V as rows [r, n]; r ≤ K + m with m previous steps.
        curvature: H̄ = VᵀHV [r, r], float64 on the CPU, symmetric. Not finite where a product
            was not.
        slots: the rows of the basis and the unused ones behind them, [K + m, n], where they stay
            in the same place from step to step; else None.
    """

    basis: Tensor
    curvature: Tensor
    slots: Tensor | None = None

    @property
    def rank(self) -> int:
        """How many independent directions there are."""
        return self.basis.shape[0]

    def combine(self, coefficients: Tensor) -> Tensor:
        """V c as a vector [n], for small c [r] (float64, CPU)."""
        return self.basis.t() @ coefficients.to(self.basis.device, self.basis.dtype)

    def project(self, vector: Tensor) -> Tensor:
        """Vᵀ vector, [r] in float64 on the CPU."""
        return (self.basis @ vector).to("cpu", torch.float64)


def krylov_basis(
    product: Product,
    solve: Product,
    gradient: Tensor,
    previous_steps: list[Tensor],
    dimension: int,
) -> Subspace:
    """Algorithm 2, safe against breakdown, with any number of previous steps.

    Args:
        product: v → Hv, vectors [n].
        solve: v → D⁻¹v.
        gradient: g [n], finite and not zero.
        previous_steps: m vectors [n], which join as the last directions in this order; none on the
            first step. Emptied, so that nothing but the basis holds them.
        dimension: K, the dimension of the Krylov part.

    With a good preconditioner D⁻¹H is near the identity and a new direction may vanish. Then the
    Krylov part ends; a previous step still joins unless it lies in the span already. On a
    GPU that takes no decision on the host: a vanished direction becomes zero, as does all that
    follows from it, and the rank is cut when H̄ is read at the end.

    Cost: r products, D⁻¹ each, and 6rn multiply-adds for each new vector. Memory: K + m vectors.
    """
    return cut(*krylov_slots(product, solve, gradient, previous_steps, dimension))


def krylov_slots(
    product: Product,
    solve: Product,
    gradient: Tensor,
    previous_steps: list[Tensor],
    dimension: int,
) -> tuple[Tensor, Tensor]:
    """Algorithm 2 before the rank is cut: rows that may be zero [K + m, n], and H̄'s rows.

    The arguments are those of `krylov_basis`. On a GPU nothing is read on the host.
    """
    size = gradient.numel()
    krylov = min(dimension, size)
    slots = krylov + len(previous_steps)
    basis = gradient.new_zeros(slots, size)
    curvature = torch.zeros(slots, slots, dtype=gradient.dtype, device=gradient.device)
    # They wait in their slots, which takes no memory of its own; H̄ does not see them there.
    for slot in range(krylov, slots):
        basis[slot] = previous_steps.pop(0)

    def curved(k: int) -> Tensor:
        """w = Hv_k; on the way the row wᵀV of H̄, as far as the diagonal."""
        w = product(basis[k])
        curvature[k, : k + 1] = basis[: k + 1] @ w
        return w

    def vanished(k: int) -> bool:
        # Reading a number costs a GPU a stop, and a CPU nothing.
        return not basis.is_cuda and not bool(basis[k].any())

    first = solve(gradient)
    basis[0] = first / first.norm()
    del first
    for k in range(1, krylov):
        basis[k] = _new_direction(basis[:k], solve(curved(k - 1)))
        if vanished(k):
            break
    else:
        curved(krylov - 1)
    for slot in range(krylov, slots):
        basis[slot] = _new_direction(basis[:slot], basis[slot])
        if not vanished(slot):
            curved(slot)
    return basis, curvature


def _new_direction(basis: Tensor, u: Tensor) -> Tensor:
    """What u adds to the span of the rows of the basis, normalised; zero if that is nothing.

    Orthogonalised twice: once leaves an error of rounding times the part that was removed,
    which can be most of u. Overwrites u.
    """
    before = u.norm()
    for _ in range(2):
        u.addmv_(basis.t(), basis @ u, alpha=-1)
    after = u.norm()
    vanished = after <= BREAKDOWN_UNITS * torch.finfo(u.dtype).eps * before
    return torch.where(vanished, 0.0, u.div_(after))


def cut(basis: Tensor, curvature: Tensor, *, stays: bool = False) -> Subspace:
    """Leave out the zero rows, in place; the lower triangle of H̄ is the whole of it.

    Args:
        basis: rows, some of them zero, [K + m, n].
        curvature: between them, [K + m, K + m].
        stays: whether the basis is in the same place at every step.
    """
    # Not any(dim=1), which makes a boolean copy of the whole basis: (K + m)/4 vectors.
    kept = (torch.linalg.vector_norm(basis, dim=1) != 0).cpu()
    rows = kept.nonzero()[:, 0].tolist()
    for slot, row in enumerate(rows):
        if slot != row:
            basis[slot] = basis[row]
    between = curvature_between(rows, curvature)
    return Subspace(basis[: len(rows)], between, basis if stays else None)


def curvature_between(rows: Sequence[int], curvature: Tensor) -> Tensor:
    """H̄ of these rows alone, symmetric, from its lower triangle; float64 on the CPU."""
    # By NumPy: torch's tril and indices wake all threads of the CPU (see `threads`).
    lower = np.tril(curvature.to("cpu", torch.float64).numpy()[np.ix_(rows, rows)])
    return torch.from_numpy(lower + np.tril(lower, -1).T)


class Coordinates:
    """Coordinates a with V̄a = VC⁻ᵀa, in which the curvature is the identity.

    Args:
        curvature: H̄ [r, r], float64, finite; any sign.
        epsilon: eigenvalues are floored to this times the largest.

    If the largest eigenvalue is not positive, the floor is ε·max|λ|; if H̄ is zero, Ĥ = I.
    """

    @one_thread()
    def __init__(self, curvature: Tensor, epsilon: float) -> None:
        self.ritz_values, vectors = torch.linalg.eigh(curvature)
        largest, size = float(self.ritz_values[-1]), float(self.ritz_values.abs().max())
        # An eigenvalue of zero is found as rounding of either sign, which must not set the floor.
        rounding = len(curvature) * torch.finfo(curvature.dtype).eps * size
        scale = largest if largest > rounding else size
        if scale == 0:
            floored = torch.ones_like(self.ritz_values)
        else:
            floored = self.ritz_values.clamp(min=epsilon * scale)
        factor = torch.linalg.cholesky((vectors * floored) @ vectors.t())
        # The inverse itself: it is applied twice per evaluation, where a triangular solve takes
        # ten times as long as a product, and the floor keeps its condition number below ε^-½.
        identity = torch.eye(len(curvature), dtype=curvature.dtype)
        self._inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)

    def to_basis(self, a: Tensor) -> Tensor:
        """C⁻ᵀ a: the coefficients of V for the coordinates a."""
        return torch.mv(self._inverse.t(), a)

    def from_gradient(self, projected: Tensor) -> Tensor:
        """C⁻¹(Vᵀ∇f): the gradient in the coordinates a."""
        return torch.mv(self._inverse, projected)
