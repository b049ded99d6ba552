"""The basis of a damped step: directions of the damped Gauss-Newton system of all residuals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.damped_directions import damped_directions
from krylov_descent.algorithms.krylov import found_on_host
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.curvature.kept_jacobian import NoJacobianError
from krylov_descent.curvature.krylov_basis import Basis
from krylov_descent.curvature.products import CurvatureProduct
from krylov_descent.curvature.residual_rows import ResidualRows, residual_rows
from krylov_descent.objective.batches import Batch


@dataclass(frozen=True, slots=True)
class DampedBasis:
    """The work of making the basis of a damped step.

    Attributes:
        product: of the Gauss-Newton matrix over all samples.
        batch: all samples.
        gradient: g [n], finite and not zero.
        damping: in the middle of those that directions are made with.
        provided_for: where the memory of a basis is kept, there is room for so many rows.
    """

    product: CurvatureProduct
    batch: Batch
    gradient: Tensor
    damping: float
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
            NoJacobianError: no damped system could be solved.
        """
        matrix, residuals = of_all
        found = damped_directions(matrix, residuals, self.damping)
        rank, size = found.rows.shape
        if not rank:
            raise NoJacobianError("no system of the residuals could be solved")
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
