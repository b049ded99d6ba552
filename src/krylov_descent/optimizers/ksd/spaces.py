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

from krylov_descent.algorithms.basis_storage import Replicated, Sharded, Storage
from krylov_descent.algorithms.stored_subspace import StoredSubspace, stored_krylov_basis
from krylov_descent.algorithms.subspace import Coordinates, LaunchedSubspace, Subspace, krylov_basis
from krylov_descent.cuda.graphs.record_basis import recorded_basis
from krylov_descent.cuda.graphs.record_search import RecordedObjective, launched_objective
from krylov_descent.curvature.preconditioners.preconditioner import (
    EntrywisePreconditioner,
    Metric,
    Preconditioner,
)
from krylov_descent.curvature.products import CurvatureProduct
from krylov_descent.objective.batches import Samples
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.ksd.search_objective import SubspaceObjective
from krylov_descent.optimizers.ksd.spread_objective import SpreadObjective

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
    """

    basis: BasisKind
    storage: Storage
    dimension: int

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
        previous: list[Tensor],
        dimension: int,
        *,
        lasting: bool,
    ) -> AnySubspace | LaunchedSubspace:
        """Algorithm 2.

        Args:
            product: v → Hv on B.
            preconditioner: D.
            gradient: g [n].
            previous: copies of the previous steps [n], zeros for those that are still to come.
                May be emptied, so that nothing but the basis holds them.
            dimension: K of this step; a longer basis than asked for is not recorded.
            lasting: whether D is that of all steps to come, and worth a long recording.
        """
        alone = not product.objective.ranks.together
        at_hand = alone and self.basis == "replicated" and self.storage.is_plain
        # With the zeros, so that what the first step records serves all that follow. They cost it
        # products, and are cut from the basis; to ask which they are would be to wait for the GPU.
        if at_hand and product.objective.recordings.possible and dimension == self.dimension:
            found = recorded_basis(
                product, preconditioner, gradient, previous, dimension, whole=lasting
            )
            if found is not None:
                return found
        previous[:] = [step for step in previous if bool(step.any())]
        if at_hand:
            return krylov_basis(product, preconditioner, gradient, previous, dimension)
        return self._stored(product, preconditioner, gradient, previous, dimension)

    def _stored(
        self,
        product: CurvatureProduct,
        preconditioner: Preconditioner,
        gradient: Tensor,
        previous: list[Tensor],
        dimension: int,
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
            previous,
            dimension,
            placement=placement,
            storage=self.storage,
        )


def awaited(
    subspace: AnySubspace | LaunchedSubspace,
    objective: Objective,
    samples: Samples,
    theta: Tensor,
    previous: Callable[[], Tensor],
    since: torch.cuda.Event | None,
) -> tuple[AnySubspace, RecordedObjective | None]:
    """The subspace, once it is there; and f_C over its place, where that is recorded.

    The evaluation at θ, and that of the noise along the previous step, are launched before a GPU is
    done with the subspace, and may write to the parameters. See `launched_objective`.
    """
    if not isinstance(subspace, LaunchedSubspace):
        return subspace, None
    recorded = launched_objective(objective, samples, theta, subspace.slots, previous, since)
    return subspace.there(), recorded


def objective_in(
    subspace: AnySubspace,
    coordinates: Coordinates,
    objective: Objective,
    samples: Samples,
    theta: Tensor,
    recorded: RecordedObjective | None,
) -> Function:
    """f_C in the coordinates of a subspace around θ [n]; by recordings where there are such."""
    if isinstance(subspace, StoredSubspace):
        return SpreadObjective(objective, samples, theta, subspace, coordinates)
    return SubspaceObjective(objective, samples, theta, subspace, coordinates, recorded)
