"""What ranks are asked to do; each function also runs in one process without a group."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from krylov_descent import KSD, HessianFree, NonlinearCG
from krylov_descent.algorithms.basis_storage import Replicated, Sharded, Storage
from krylov_descent.algorithms.coordinates import Coordinates
from krylov_descent.algorithms.metric import Diagonal
from krylov_descent.algorithms.subspace import krylov_basis
from krylov_descent.curvature.preconditioners.preconditioner import Identity
from krylov_descent.curvature.products import Curvature
from krylov_descent.objective.batches import as_samples
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.search_objective import SearchObjective
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.ksd import subset_growth as growing_sets
from krylov_descent.runtime.ranks import Ranks
from tests.optimizers.nets import beginning_small, classes, net, noisy_classes, parameters_of

OPTIMIZERS: dict[str, Any] = {"ksd": KSD, "hf": HessianFree, "ncg": NonlinearCG}
# Small enough for a step in a fraction of a second, and so short that the search does not end by
# noise, which rounding decides.
OPTIONS: dict[str, dict[str, Any]] = {
    "ksd": {"dimension": 6, "subset_size": (20, 24), "bfgs_iterations": 5},
    "hf": {"cg_iterations": 12, "chunk_size": 25},
    "ncg": {"iterations": 3},
}
SAMPLES = 61
NUMBERS = (
    *("loss", "loss_before", "loss_after", "gradient_norm", "step_norm", "passes", "damping"),
    *("rank", "samples", "curvature_samples", "objective_samples"),
    *("iterations", "evaluations", "products"),
)
Data = tuple[Tensor, Tensor]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def own(data: Data, sizes: Sequence[int]) -> Data:
    """The shard of this rank, where shards have these sizes; everything in one process."""
    if not dist.is_initialized():
        return data
    start = sum(sizes[: rank()])
    stop = start + sizes[rank()]
    return data[0][start:stop], data[1][start:stop]


def make(name: str, model: nn.Module, **options: Any) -> DataOptimizer:
    kind, settings = OPTIMIZERS[name], {**OPTIONS[name], **options}
    optimizer: DataOptimizer = kind(model, nn.CrossEntropyLoss(), weight_decay=1e-3, **settings)
    return optimizer


def steps(
    name: str,
    options: dict[str, Any],
    sizes: Sequence[int],
    count: int = 2,
    batches_of: int | None = None,
) -> dict[str, Any]:
    """Some steps in float64, and what they led to.

    Args:
        name: of the optimiser.
        options: beyond those of `OPTIONS`.
        sizes: of the shards.
        count: how many steps.
        batches_of: give the data as a stream of batches of this size.
    """
    model = net(torch.float64)
    optimizer = make(name, model, **options)
    data: Any = own(classes(SAMPLES, torch.float64), sizes)
    if batches_of is not None:
        inputs, targets = data
        pieces = zip(inputs.split(batches_of), targets.split(batches_of), strict=True)
        data = list(pieces) if len(inputs) else []
    results = [optimizer.step(data) for _ in range(count)]
    return told_of(optimizer, model, results)


def told_of(optimizer: DataOptimizer, model: nn.Module, results: list[Any]) -> dict[str, Any]:
    """What steps led to."""
    return {
        "parameters": parameters_of(model),
        "results": [{key: getattr(found, key) or 0 for key in NUMBERS} for found in results],
        "moved": [found.status.moved for found in results],
        "state": torch.cat(
            [v.reshape(-1) for state in optimizer.state.values() for v in state.values()]
        ),
    }


def steps_with_sets_by_hand(name: str, sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Two steps, with B of the first 20 samples and C of the last 24, as `steps`.

    Args:
        name: of the optimiser; Hessian-Free has no C.
        sizes: of the shards of A, B and C.
    """
    model = net(torch.float64)
    optimizer: Any = make(name, model)
    inputs, targets = classes(SAMPLES, torch.float64)
    data = own((inputs, targets), sizes[0])
    sets = {"curvature_data": own((inputs[:20], targets[:20]), sizes[1])}
    if name == "ksd":
        sets["objective_data"] = own((inputs[-24:], targets[-24:]), sizes[2])
    results = [optimizer.step(data, **sets) for _ in range(2)]
    return told_of(optimizer, model, results)


def sizes_of_growing_sets(
    sizes: Sequence[int], count: int, copying: int | None = None
) -> list[tuple[int, float]]:
    """Samples in C and the loss on A, step by step, with sets that grow.

    Args:
        sizes: of the shards.
        count: how many steps.
        copying: a rank that gives new tensors at each step.
    """
    _, optimizer, (x, y) = _growing(sizes)
    results = [optimizer.step((x.clone() if rank() == copying else x, y)) for _ in range(count)]
    return [(result.objective_samples, result.loss) for result in results]


def fingerprints(sizes: Sequence[int]) -> list[float]:
    """Of some data; of copies; with the last quarter changed; and where a rank has a stream.

    Args:
        sizes: of the shards, the last of at least a quarter.
    """
    last, ranks = growing_sets.LastData(), Ranks(torch.device("cpu"))
    x, y = classes(sum(sizes), torch.float64)
    inputs, targets = own((x, y), sizes)
    changed = x.clone()
    changed[-(len(x) // 4) :] += 1
    stream: Any = [(inputs, targets)] if rank() == ranks.size - 1 else (inputs, targets)
    data = ((inputs, targets), (inputs.clone(), targets), own((changed, y), sizes), stream)
    return [last.fingerprint(as_samples(one, may_be_empty=True), ranks) for one in data]


def state_of_growing_sets(sizes: Sequence[int], count: int) -> tuple[Any, Any, int]:
    """Model and optimiser after some steps with sets that grow, and samples in C at the last."""
    model, optimizer, data = _growing(sizes)
    for _ in range(count):
        result = optimizer.step(data)
    return model.state_dict(), optimizer.state_dict(), result.objective_samples


def sizes_after_loading(sizes: Sequence[int], model_state: Any, state: Any) -> list[int]:
    """Samples in C at the first two steps with that state."""
    model, optimizer, data = _growing(sizes)
    model.load_state_dict(model_state)
    optimizer.load_state_dict(state)
    return [optimizer.step(data).objective_samples for _ in range(2)]


def _growing(sizes: Sequence[int]) -> tuple[nn.Module, KSD, Data]:
    torch.manual_seed(3)
    model = nn.Linear(6, 3).double()
    optimizer = beginning_small(KSD(model, nn.CrossEntropyLoss(), dimension=10))
    return model, optimizer, own(noisy_classes(sum(sizes), 6, 3), sizes)


def pieces_of_a_step(sizes: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradient, Fisher diagonal, basis, projected curvature and one evaluation of KSD."""
    model = net(dtype)
    objective = Objective(model, nn.CrossEntropyLoss())
    data = as_samples(own(classes(SAMPLES, dtype), sizes), may_be_empty=True)
    found = objective.value_gradient_and_squares(data)
    along = torch.linspace(-1, 1, found.gradient.numel(), dtype=dtype)
    subspace = krylov_basis(
        Curvature().at(objective, data).part,
        Diagonal(found.squares.clamp(min=1e-4 * float(found.squares.max()))),
        found.gradient,
        [along, along.square()],
        5,
        placement=Replicated(objective.ranks, found.gradient.numel()),
        storage=Storage(),
    )
    coordinates = Coordinates(subspace.curvature, subspace.gram, 1e-4)
    function = SearchObjective(objective, data, along.clone).over(subspace, coordinates)
    value, projected = function(np.linspace(0.1, 0.2, subspace.rank))
    return {
        "gradient": found.gradient,
        "squares": found.squares,
        "basis": torch.stack([subspace.rows.get(k) for k in range(subspace.rank)]),
        "curvature": subspace.curvature,
        "value": torch.tensor([found.value, value, objective.value(data)]),
        "projected": torch.from_numpy(projected),
    }


def numbers_of_a_sharded_basis(dimension: int) -> int:
    """How many numbers of the basis this rank keeps."""
    n = 50
    generator = torch.Generator().manual_seed(0)
    diagonal = torch.rand(n, dtype=torch.float64, generator=generator)
    gradient = torch.randn(n, dtype=torch.float64, generator=generator)
    ranks = Ranks(torch.device("cpu"))
    subspace = krylov_basis(
        lambda v: diagonal * v / ranks.size,
        Identity(),
        gradient,
        [gradient.flip(0)],
        dimension,
        placement=Sharded(ranks, n),
        storage=Storage(),
    )
    assert subspace.rank == dimension + 1
    return subspace.rows.stored.numel()


def agreement_of_sums() -> list[Tensor]:
    """Sums over ranks of numbers that round differently in each order."""
    ranks = Ranks(torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank())
    small = torch.randn(22, dtype=torch.float64, generator=generator) * 10.0 ** rank()
    large = torch.randn(10_001, generator=generator)
    slices = ranks.sum_to_slices(large.clone())
    return [
        ranks.sum_numbers(small),
        ranks.sum_vector(large),
        ranks.gather_slices(slices, len(large)),
    ]


# The laboratory -----------------------------------------------------------------------------------

TRAINING: dict[str, Any] = {
    "problem": "curves",
    "problem_options": {"size": "small", "train": 61, "validation": 21, "test": 20},
    "optimizer_options": {"dimension": 4, "bfgs_iterations": 5},
}


def train(folder: Path, iterations: int, optimizer: str = "ksd") -> list[str]:
    """A run of the laboratory; what this rank showed."""
    from krylov_descent.laboratory.limits import Limits
    from krylov_descent.laboratory.record import RunFolder
    from krylov_descent.laboratory.runs import load, prepare
    from krylov_descent.laboratory.settings import RunSettings

    options = TRAINING if optimizer == "ksd" else TRAINING | {"optimizer_options": {}}
    limits = Limits(iterations=iterations)
    settings = RunSettings(**options, optimizer=optimizer, limits=limits)
    shown: list[str] = []
    training = prepare(
        settings,
        load(settings),
        RunFolder(folder),
        on_row=lambda row, _: shown.append(f"{row['iteration']} {row['train']}"),
    )
    training.run()
    return shown


# Bytes --------------------------------------------------------------------------------------------

EXCHANGES = {
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
    "all_gather": "all-gather",
    "_all_gather_single": "all-gather",
    "_reduce_scatter_single": "reduce-scatter",
}


def bytes_of_steps(name: str, options: dict[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """What the second step of an optimiser sent, as it counts it and as it reached torch.

    The second count is made in the place of torch's own functions, which are then called.
    """
    from krylov_descent.runtime import ranks as distributed

    model = net(torch.float64)
    optimizer = make(name, model, **options)
    data = own(classes(SAMPLES, torch.float64), sizes)
    optimizer.step(data)
    ranks = optimizer.objective.ranks
    ranks.traffic.clear()
    seen: list[tuple[str, str, int]] = []

    def counted(function: Any, kind: str) -> Any:
        def call(tensor: Any, *rest: Any, **options: Any) -> Any:
            payload = rest[0] if kind == "reduce-scatter" else tensor
            tensors = payload if isinstance(payload, list) else [payload]
            seen.append((ranks._phase, kind, sum(t.nbytes for t in tensors)))
            return function(tensor, *rest, **options)

        return call

    places: list[tuple[Any, str]] = [
        (dist if hasattr(dist, attribute) else distributed, attribute) for attribute in EXCHANGES
    ]
    before = [getattr(place, attribute) for place, attribute in places]
    try:
        for (place, attribute), function in zip(places, before, strict=True):
            setattr(place, attribute, counted(function, EXCHANGES[attribute]))
        result = optimizer.step(data)
    finally:
        for (place, attribute), function in zip(places, before, strict=True):
            setattr(place, attribute, function)
    assert result.status.moved
    return {
        "traffic": {key: (sent.calls, sent.bytes) for key, sent in ranks.traffic.items()},
        "seen": seen,
        "evaluations": result.evaluations,
        "products": result.products,
    }
