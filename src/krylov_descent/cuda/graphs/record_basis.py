"""The basis of a step by recordings: as one CUDA graph, or with one for each product.

As one it is all products, preconditioning and orthogonalisation, without the host in between. To
record that takes as long as the host needs for a whole basis, some tenths of a second for a deep
net, which pays after some dozens of steps. With a preconditioner of many kernels it would be twice
as long: then what is the same for every direction is recorded once and inserted (`insertions`),
which costs each step a few hundredths of a basis. Where the preconditioner is for few steps, or the
whole cannot be recorded, only the product is, and the rest is launched around it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from krylov_descent.algorithms.krylov import Product
from krylov_descent.algorithms.subspace import LaunchedSubspace, fill_slots
from krylov_descent.cuda.graphs.capture import Inserted, InsertedMap, is_foreign
from krylov_descent.cuda.graphs.child_graphs import can_insert
from krylov_descent.cuda.graphs.parallel_branches import side_by_side
from krylov_descent.cuda.graphs.staleness import Recordings
from krylov_descent.cuda.triton.entry import under_way
from krylov_descent.curvature.preconditioners.preconditioner import (
    Entrywise,
    InPlace,
    Metric,
    Preconditioner,
)
from krylov_descent.curvature.products import CurvatureKind, CurvatureProduct
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network

# That there are two directions before it makes the third one like all that follow; and so is one
# previous step like the others.
REHEARSED, REHEARSED_PREVIOUS = 3, 1


def basis_is_recorded(recordings: Recordings, kind: CurvatureKind) -> bool:
    """Whether there is a recording of the whole basis with this curvature."""
    return recordings.has(_name(kind))


def recorded_basis(
    product: CurvatureProduct,
    preconditioner: Preconditioner,
    gradient: Tensor,
    previous_steps: list[Tensor],
    dimension: int,
    *,
    whole: bool,
) -> LaunchedSubspace | None:
    """What `krylov_basis` gives, in the same place at every step, and not waited for.

    None where B does not fit one micro-batch.

    Args:
        product: v → Hv, not used before.
        preconditioner: D. As a whole the basis is recorded only if its tensors do not move.
        gradient: g [n].
        previous_steps: m vectors [n]; as many at every step. May be emptied.
        dimension: K.
        whole: whether to have it as one recording.
    """
    batch = product.single_batch
    if batch is None:
        return None
    rows = min(dimension, gradient.numel()) + len(previous_steps)
    slots, found = product.objective.recordings.room(rows, gradient), None
    if whole and isinstance(preconditioner, InPlace):
        found = _replay(slots, product, preconditioner, batch, gradient, previous_steps)
    if found is None:
        found = fill_slots(slots, product, preconditioner, gradient, previous_steps)
    return LaunchedSubspace(slots, found)


def _replay(
    slots: Tensor,
    product: CurvatureProduct,
    preconditioner: InPlace,
    batch: Batch,
    gradient: Tensor,
    previous_steps: list[Tensor],
) -> Tensor | None:
    """What `fill_slots` gives, by one launch; None where that is not possible."""

    def build(
        rows: Tensor,
        joining: int,
        network: Network,
        batch: Batch,
        gradient: Tensor,
        scale: Tensor,
        *previous_steps: Tensor,
        held: _Repeated | None = None,
    ) -> Tensor:
        """The first of the previous steps join, so many of them."""
        joined = list(previous_steps[:joining])
        metric: Metric = preconditioner
        if held is None:
            products = product.over(network, batch, scale)
        else:
            products, metric = held.prepare(), held.metric
        return fill_slots(rows, products, metric, gradient, joined)

    def repeated(
        network: Network, batch: Batch, gradient: Tensor, scale: Tensor, *previous_steps: Tensor
    ) -> _Repeated:
        over = partial(product.over, network, batch, scale)
        return _Repeated.recorded(network, over, preconditioner, gradient)

    joining = len(previous_steps)
    short_joining = min(REHEARSED_PREVIOUS, joining)
    short_rows = min(REHEARSED, len(slots) - joining) + short_joining
    recordings = product.objective.recordings
    recording = recordings.load(
        _name(product.kind),
        partial(build, slots, joining),
        batch,
        gradient,
        gradient.new_full((), product.scale),  # by a kernel: a copy would wait for all before it
        *previous_steps,
        fixed=(slots, *preconditioner.tensors),
        rehearsal=partial(build, slots[:short_rows], short_joining),
        foreign=is_foreign(preconditioner),
        held=repeated if can_insert() and not isinstance(preconditioner, Entrywise) else None,
    )
    if recording is None:
        return None
    found: Tensor = recording()
    # First: the gradient's numbers may be read there, and say whether the recordings hold.
    recordings.work_meanwhile()
    if not recordings.hold(batch):
        return None
    product.products += len(slots)
    return found


@dataclass(frozen=True, slots=True)
class _Repeated:
    """What is the same for every direction, recorded.

    Attributes:
        linearize: what comes before all products.
        product: v → Hv.
        metric: D.
    """

    linearize: Callable[[], Any]
    product: Product
    metric: Metric

    @classmethod
    def recorded(
        cls,
        network: Network,
        over: Callable[[], Product],
        preconditioner: InPlace,
        like: Tensor,
    ) -> "_Repeated":
        """Record it.

        Args:
            network: that it is about.
            over: linearises, and gives v → Hv.
            preconditioner: D.
            like: a vector.
        """

        def prepare() -> Product:
            products = under_way()
            if products is not None:  # of matrices that all products with D have in common
                side_by_side(products.prepare(preconditioner.tensors))
            return over()

        first = Inserted(network, prepare)
        apply = first()
        product = InsertedMap(network, apply, like.clone(), after=first)
        # D⁻¹ is asked for of a product, and finds it where it is.
        of_metric = partial(InsertedMap, network, after=first, foreign=is_foreign(preconditioner))
        solve = of_metric(preconditioner.solve, product(like))
        multiply = of_metric(preconditioner.multiply, like.clone())
        return cls(first, product, _InsertedMetric(solve, multiply))

    def prepare(self) -> Product:
        """Linearise; returns v → Hv."""
        self.linearize()
        return self.product


@dataclass(frozen=True, slots=True)
class _InsertedMetric:
    """D by recordings of its two products, whose results the next ones overwrite."""

    solve: Product
    multiply: Product


def _name(kind: CurvatureKind) -> str:
    return f"basis of {kind}"
