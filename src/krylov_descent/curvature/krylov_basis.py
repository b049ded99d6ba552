"""The Krylov basis of a step: Algorithm 2 with the curvature on B and the preconditioner D."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from krylov_descent.algorithms.basis_storage import Placement, Replicated, Sharded, Storage
from krylov_descent.algorithms.damped_directions import DampedDirections
from krylov_descent.algorithms.metric import Metric
from krylov_descent.algorithms.subspace import Subspace, krylov_basis
from krylov_descent.curvature.preconditioners.preconditioner import (
    EntrywisePreconditioner,
    Preconditioner,
)
from krylov_descent.curvature.products import Curvature, CurvatureProduct
from krylov_descent.objective.batches import Batch, Samples
from krylov_descent.objective.objective import Objective

BasisKind = Literal["replicated", "sharded"]


@dataclass(frozen=True, slots=True)
class BasisLayout:
    """How the basis is stored.

    Attributes:
        kind: "replicated" for whole vectors on every rank, "sharded" for a slice of each on a rank.
        storage: dtype and device of the stored vectors.

    Raises:
        ValueError: the kind is unknown.
    """

    kind: BasisKind
    storage: Storage

    def __post_init__(self) -> None:
        if self.kind not in get_args(BasisKind):
            raise ValueError(
                f"`basis` must be one of {', '.join(map(repr, get_args(BasisKind)))}, "
                f"found {self.kind!r}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether whole vectors are stored as they are."""
        return self.kind == "replicated" and self.storage.is_plain

    def check(self, preconditioner: Preconditioner) -> None:
        """Raise ValueError if the basis is sharded and the preconditioner needs whole vectors."""
        if self.kind == "sharded" and not isinstance(preconditioner, EntrywisePreconditioner):
            raise ValueError(
                "`basis='sharded'` needs a preconditioner that acts entry by entry, with a method "
                f"part(slice), which {type(preconditioner).__name__} has not: "
                "use 'fisher-diagonal' or 'identity', or basis='replicated'"
            )


@dataclass(frozen=True, slots=True)
class Basis:
    """The basis of a step, and how it was made.

    Attributes:
        subspace: V, and the projected curvature.
        samples: |B|, over all ranks.
        graphs_kept: whether the autograd graphs of all of B were kept for the products.
        by_jacobian: whether the products were by a kept Jacobian.
        samples_for_metric: how many samples of B the preconditioner computed the gradient of.
        damped: the damped directions that the basis spans; None for a Krylov basis.
    """

    subspace: Subspace
    samples: int
    graphs_kept: bool
    by_jacobian: bool
    samples_for_metric: int
    damped: DampedDirections | None = None

    @property
    def products(self) -> int:
        """How many curvature products it took: one for each direction, and none where damped."""
        return self.subspace.rank if self.damped is None else 0


@dataclass(frozen=True, slots=True)
class KrylovBasis:
    """The work of making the basis of a step.

    Attributes:
        objective: f.
        curvature: H.
        samples: the set B.
        preconditioner: D.
        learn: completes D with this rank's batches of B, and returns whether D took their gradient.
        gradient: g [n], finite and not zero.
        previous_steps: m vectors [n], which join as the last directions. The list is emptied.
        most_previous: the number of previous steps that later steps will have.
        dimension: K.
        provided_for: where the memory of a basis is kept, there is room for so many directions.
        layout: how the basis is stored.
    """

    objective: Objective
    curvature: Curvature
    samples: Samples
    preconditioner: Preconditioner
    learn: Callable[[Objective, Sequence[Batch]], bool]
    gradient: Tensor
    previous_steps: list[Tensor]
    most_previous: int
    dimension: int
    provided_for: int
    layout: BasisLayout

    def prepare(self) -> tuple[CurvatureProduct, int]:
        """The curvature product over B, and the `samples_for_metric` of the basis."""
        product = self.curvature.at(self.objective, self.samples)
        took_gradient = self.learn(self.objective, product.batches)
        return product, product.samples if took_gradient else 0

    def run(self) -> Basis:
        """Prepare, then make the basis."""
        return self.build(*self.prepare())

    def build(self, product: CurvatureProduct, learnt: int) -> Basis:
        """Make the basis by Algorithm 2, given what `prepare` returned."""
        ranks, size = self.objective.ranks, self.gradient.numel()
        metric: Metric = self.preconditioner
        placement: Placement = Replicated(ranks, size)
        if self.layout.kind == "sharded":
            placement = sharded = Sharded(ranks, size)
            assert isinstance(self.preconditioner, EntrywisePreconditioner)
            metric = self.preconditioner.part(sharded.part)
        subspace = krylov_basis(
            product.part,
            metric,
            self.gradient,
            self.previous_steps,
            self.dimension,
            placement=placement,
            storage=self.layout.storage,
        )
        return Basis(subspace, product.samples, product.kept, product.by_jacobian, learnt)
