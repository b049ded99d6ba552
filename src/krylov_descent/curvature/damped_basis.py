"""The basis of a damped step: directions of the damped Gauss-Newton system of all residuals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.damped_directions import damped_directions, independent_residuals
from krylov_descent.algorithms.krylov import found_on_host
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.curvature.krylov_basis import Basis
from krylov_descent.curvature.products import CurvatureProduct
from krylov_descent.curvature.residual_rows import ResidualRows, residual_rows
from krylov_descent.objective.batches import Batch

# Where fewer directions change all residuals, a Krylov space soon has all of them: 8 for one
# equation in one dimension, and 27 to 55 for five in two (results/trials/damped_directions.json).
FEWEST_DIRECTIONS = 20


class UnsuitedError(RuntimeError):
    """Damped directions cannot be had, or are not worth their work."""


@dataclass(frozen=True, slots=True)
class DampedBasis:
    """The work of making the basis of a damped step.

    Attributes:
        product: of the Gauss-Newton matrix over all samples.
        batch: all samples.
        gradient: g [n], finite and not zero.
        damping: in the middle of those that directions are made with.
        first: whether to look first if damped directions are worth their work.
        provided_for: where the memory of a basis is kept, there is room for so many rows.
    """

    product: CurvatureProduct
    batch: Batch
    gradient: Tensor
    damping: float
    first: bool
    provided_for: int

    def run(self) -> Basis:
        """Make the rows of J, and then the basis."""
        network, room = self.product.objective.network, self.product.room()
        return self.build(residual_rows(network, self.batch, room))

    def build(self, of_all: ResidualRows, slots: Tensor | None = None) -> Basis:
        """Make the basis.

        Args:
            of_all: all residuals.
            slots: memory for the rows of the basis [`provided_for`, n].

        Raises:
            UnsuitedError: too few directions change all residuals, or no system could be solved.
        """
        matrix, residuals = of_all
        if self.first and independent_residuals(matrix) < FEWEST_DIRECTIONS:
            raise UnsuitedError("few directions change all residuals")
        found = damped_directions(matrix, residuals, self.damping)
        rank, size = found.rows.shape
        if not rank:
            raise UnsuitedError("no system of the residuals could be solved")
        stored = found.rows
        if slots is not None:
            slots[:rank] = found.rows
            stored = slots
        rows = StoredBasis.at(stored)
        rows.cut(rank)
        images = found.rows @ matrix.t()
        squared = self.gradient.square().sum().expand(1, rank)
        curvature = self.product.scale * (images @ images.t())
        numbers = torch.cat([curvature, found.rows @ found.rows.t(), squared])
        subspace = Subspace(rows, Alone(size), found_on_host(numbers))
        return Basis(subspace, self.product.samples, True, True, 0, found)
