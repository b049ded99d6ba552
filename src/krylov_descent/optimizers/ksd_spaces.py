"""Where a step of KSD searches: the basis as it is to be kept, and the objective over it.

In one process with its basis at hand both are made for speed (`subspace`, `subspace_objective`,
recorded on a GPU). On several ranks, or with a basis that is kept elsewhere, they are made of
parts (`stored_subspace`, `spread_objective`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from krylov_descent.basis import Replicated, Sharded, Storage
from krylov_descent.batches import Samples
from krylov_descent.curvature import CurvatureProduct
from krylov_descent.objective import Objective
from krylov_descent.preconditioner import EntrywisePreconditioner, Metric, Preconditioner
from krylov_descent.recorded_basis import recorded_basis
from krylov_descent.spread_objective import SpreadObjective
from krylov_descent.stored_subspace import StoredSubspace, stored_krylov_basis
from krylov_descent.subspace import Coordinates, Subspace, krylov_basis
from krylov_descent.subspace_objective import SubspaceObjective

BasisKind = Literal["replicated", "sharded"]
AnySubspace = Subspace | StoredSubspace
Function = SubspaceObjective | SpreadObjective


@dataclass(frozen=True, slots=True)
class Spaces:
    """How the basis is kept.

    Attributes:
        basis: on every rank as a whole, or in slices.
        storage: in which dtype, and where.
        dimension: K.
        previous_steps: m, of which there are fewer in the first steps.
    """

    basis: BasisKind
    storage: Storage
    dimension: int
    previous_steps: int

    def __post_init__(self) -> None:
        if self.basis not in get_args(BasisKind):
            raise ValueError(
                f"`basis` must be one of {', '.join(map(repr, get_args(BasisKind)))}, "
                f"found {self.basis!r}"
            )

    def check(self, preconditioner: Preconditioner) -> None:
        """Refuse one that a basis in slices cannot be made with."""
        if self.basis == "sharded" and not isinstance(preconditioner, EntrywisePreconditioner):
            raise ValueError(
                "`basis='sharded'` needs a preconditioner that acts entry by entry, with a method "
                f"part(slice), which {type(preconditioner).__name__} has not: "
                "use 'fisher-diagonal' or 'identity', or basis='replicated'"
            )

    def subspace(
        self,
        product: CurvatureProduct,
        preconditioner: Preconditioner,
        gradient: Tensor,
        previous: Callable[[], list[Tensor]],
    ) -> AnySubspace:
        """Algorithm 2.

        Args:
            product: v → Hv on B.
            preconditioner: D.
            gradient: g [n].
            previous: gives the previous steps [n], copies that are not held on to here.
        """
        ranks = product.objective.ranks
        if ranks.together or self.basis == "sharded" or not self.storage.is_plain:
            return self._stored(product, preconditioner, gradient, previous)
        joining, dimension = previous(), self.dimension
        found = None
        # Zeros in place of steps that are still to come, so that what the first step records
        # serves all that follow. They cost it products, and are cut from the basis.
        if product.objective.recordings.possible:
            to_come = [torch.zeros_like(gradient)] * (self.previous_steps - len(joining))
            found = recorded_basis(product, preconditioner, gradient, joining + to_come, dimension)
        if found is None:
            found = krylov_basis(product, preconditioner, gradient, joining, dimension)
        return found

    def _stored(
        self,
        product: CurvatureProduct,
        preconditioner: Preconditioner,
        gradient: Tensor,
        previous: Callable[[], list[Tensor]],
    ) -> StoredSubspace:
        ranks, size = product.objective.ranks, gradient.numel()
        placement: Replicated | Sharded = Replicated(ranks, size)
        metric: Metric = preconditioner
        if self.basis == "sharded":
            placement = Sharded(ranks, size)
            assert isinstance(preconditioner, EntrywisePreconditioner)
            metric = preconditioner.part(placement.part)
        return stored_krylov_basis(
            product.part,
            metric,
            gradient,
            previous(),
            self.dimension,
            placement=placement,
            storage=self.storage,
        )


def objective_in(
    subspace: AnySubspace,
    coordinates: Coordinates,
    objective: Objective,
    samples: Samples,
    theta: Tensor,
) -> Function:
    """f_C in the coordinates of a subspace around θ [n]."""
    if isinstance(subspace, StoredSubspace):
        return SpreadObjective(objective, samples, theta, subspace, coordinates)
    return SubspaceObjective(objective, samples, theta, subspace, coordinates)
