"""Krylov subspaces of dense matrices, and how far they are from what they should be."""

from collections.abc import Callable

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, Storage
from krylov_descent.algorithms.krylov import Product
from krylov_descent.algorithms.metric import Diagonal, Metric
from krylov_descent.algorithms.subspace import Subspace, krylov_basis
from tests.matrices import numbers

Build = Callable[[Tensor, Tensor, Tensor, list[Tensor], int], tuple[Subspace, int]]
"""From dense H, diagonal D [n], g, previous steps and K to the subspace and its products."""


class Dear:
    """D as any matrix might be given: nothing says that it is diagonal."""

    def __init__(self, diagonal: Tensor) -> None:
        self.diagonal, self.multiplied = diagonal, 0

    def solve(self, vector: Tensor) -> Tensor:
        return vector / self.diagonal

    def multiply(self, vector: Tensor) -> Tensor:
        self.multiplied += 1
        return vector * self.diagonal


METRICS: list[Callable[[Tensor], Metric]] = [Diagonal, Dear]


def basis_in_one_process(
    product: Product,
    metric: Metric,
    gradient: Tensor,
    previous_steps: list[Tensor],
    dimension: int,
    storage: Storage | None = None,
) -> Subspace:
    """Algorithm 2 where one process keeps whole vectors."""
    return krylov_basis(
        product,
        metric,
        gradient,
        previous_steps,
        dimension,
        placement=Alone(gradient.numel()),
        storage=storage or Storage(),
    )


def vectors(subspace: Subspace) -> Tensor:
    """The basis as rows [r, n], in the dtype in which it is kept."""
    return subspace.rows.stored[: subspace.rank]


def builder(metric: Callable[[Tensor], Metric]) -> Build:
    """Subspaces with D given in this way."""

    def build(
        H: Tensor, D: Tensor, g: Tensor, previous: list[Tensor], dimension: int
    ) -> tuple[Subspace, int]:
        products = 0

        def product(v: Tensor) -> Tensor:
            nonlocal products
            products += 1
            return H @ v

        subspace = basis_in_one_process(product, metric(D), g, list(previous), dimension)
        return subspace, products

    return build


def outside(subspace: Subspace, vector: Tensor) -> float:
    """The part of a vector outside the span, relative to the vector."""
    # Rows have lengths of their own: by QR, with each of them made 1 before.
    Q = torch.linalg.qr(torch.nn.functional.normalize(vectors(subspace).double()).t()).Q
    v = vector.double()
    return float((v - Q @ (Q.t() @ v)).norm() / v.norm())


def gram_error(subspace: Subspace, D: Tensor) -> float:
    """How far VᵀDV is from 1."""
    V = vectors(subspace).double()
    return float(((V * D) @ V.t() - torch.eye(subspace.rank, dtype=torch.float64)).abs().max())


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
