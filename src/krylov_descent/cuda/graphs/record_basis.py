"""The Krylov basis of a step by recordings, at the same address in every step.

With a diagonal D the whole basis is one recording of all products, preconditioning and
orthogonalisation. Recording it takes as long as one eager basis, some tenths of a second for a deep
net, so it is done only if D stays in place over steps. Otherwise each curvature product and each
product with D is one launch, and the host launches the other kernels eagerly.
"""

from functools import partial

from torch import Tensor

from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.krylov import fill_with_krylov_space
from krylov_descent.algorithms.metric import Entrywise, Metric
from krylov_descent.algorithms.subspace import cut
from krylov_descent.cuda.graphs.capture import is_foreign
from krylov_descent.cuda.graphs.host_transfer import to_host
from krylov_descent.cuda.graphs.record_factors import RecordedMetric
from krylov_descent.cuda.graphs.record_product import product_name
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.curvature.krylov_basis import Basis, KrylovBasis
from krylov_descent.curvature.preconditioners.preconditioner import EntrywiseInPlace, InPlace
from krylov_descent.curvature.products import CurvatureProduct, Product
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.engine import Launched

# Krylov directions and previous steps of a warm-up. The third direction runs the same kernels as
# all later ones, and the first previous step the same as the others.
REHEARSED, REHEARSED_PREVIOUS = 3, 1
METRIC = "metric"


def launch_basis(engine: Recorder, work: KrylovBasis) -> Launched[Basis]:
    """The basis; launched at once if it is recorded already and the step is repeatable."""
    at_hand = work.layout.kind == "replicated" and work.layout.storage.is_plain
    if work.objective.ranks.together or not at_hand or not work.usual:
        return Launched(work.run)
    has = engine.graphs.has
    ready = has(_name(work)) or (has(METRIC) and has(product_name(work.curvature)))
    if engine.repeatable and ready:
        return _launched(engine, work)
    return Launched(lambda: _launched(engine, work).result())


def _launched(engine: Recorder, work: KrylovBasis) -> Launched[Basis]:
    product, learnt = work.prepare()
    batch = product.single_batch
    if batch is None:
        return Launched(lambda: work.build(product, learnt))
    krylov, joining = min(work.dimension, work.gradient.numel()), len(work.previous_steps)
    slots = engine.graphs.room(krylov + work.most_previous, work.gradient)
    rows = slots[: krylov + joining]
    if joining < work.most_previous:
        slots[krylov + joining :].zero_()  # evaluations multiply them by 0, and 0·NaN is NaN
    found: Tensor | None = None
    if work.lasting and joining == work.most_previous:
        found = _replayed(engine, work, product, batch, rows)
    if found is None:
        found = _filled(rows, product, _metric(engine, work), work.gradient, work.previous_steps)
    engine.basis_slots, on_host = slots, to_host(found)

    def there() -> Basis:
        stored = StoredBasis.at(rows)
        subspace = cut(stored, Alone(stored.stored.shape[1]), on_host.result())
        return Basis(subspace, product.samples, product.kept, learnt)

    return Launched(there)


def _filled(
    rows: Tensor,
    product: Product,
    metric: Metric,
    gradient: Tensor,
    previous_steps: list[Tensor],
) -> Tensor:
    """Run Algorithm 2 into rows [K + m, n]; returns the numbers that `cut` needs."""
    if not rows.is_cuda:
        rows.zero_()  # on a CPU rows after a breakdown are not written
    stored, placement = StoredBasis.at(rows), Alone(gradient.numel())
    return fill_with_krylov_space(stored, product, metric, gradient, previous_steps, placement)


def _metric(engine: Recorder, work: KrylovBasis) -> Metric:
    """D, or recordings of its products if each product takes many kernels."""
    D = work.preconditioner
    if not (work.lasting and isinstance(D, InPlace)) or isinstance(D, Entrywise):
        return D
    make = partial(RecordedMetric, D, work.gradient)
    recorded = engine.graphs.made(METRIC, make, fixed=D.tensors)
    if recorded is None:
        return D
    recorded.load()
    return recorded


def _replayed(
    engine: Recorder,
    work: KrylovBasis,
    product: CurvatureProduct,
    batch: Batch,
    rows: Tensor,
) -> Tensor | None:
    """The whole basis by one launch; None if it cannot be recorded or is stale."""
    if not isinstance(work.preconditioner, EntrywiseInPlace):
        return None
    D = work.preconditioner

    def build(
        rows: Tensor,
        joining: int,
        network: Network,
        batch: Batch,
        gradient: Tensor,
        scale: Tensor,
        *previous_steps: Tensor,
    ) -> Tensor:
        """Build the basis with the first `joining` of the previous steps."""
        over = product.over(network, batch, scale)
        return _filled(rows, over, D, gradient, list(previous_steps[:joining]))

    gradient, joining = work.gradient, len(work.previous_steps)
    short_joining = min(REHEARSED_PREVIOUS, joining)
    short_rows = min(REHEARSED, len(rows) - joining) + short_joining
    recording = engine.graphs.load(
        _name(work),
        partial(build, rows, joining),
        batch,
        gradient,
        gradient.new_full((), product.scale),  # by a kernel: a copy would synchronise
        *work.previous_steps,
        fixed=(rows, *D.tensors),
        rehearsal=partial(build, rows[:short_rows], short_joining),
        foreign=is_foreign(D),
    )
    if recording is None:
        return None
    found: Tensor = recording()
    return found if engine.are_fresh(batch) else None


def _name(work: KrylovBasis) -> str:
    return f"basis of {work.curvature.kind}"
