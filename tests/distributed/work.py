"""What ranks are asked to do; each function also runs in one process without a group."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from krylov_descent import KSD, FirstOrder, HessianFree, NonlinearCG
from krylov_descent.basis import Replicated, Sharded, Storage
from krylov_descent.batches import as_samples
from krylov_descent.curvature import Curvature
from krylov_descent.distributed import Ranks
from krylov_descent.objective import Objective
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.spread_objective import SpreadObjective
from krylov_descent.stored_subspace import stored_krylov_basis
from krylov_descent.subspace import Coordinates
from tests.optimizers.nets import classes, net, parameters_of

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
    return {
        "parameters": parameters_of(model),
        "results": [{key: getattr(found, key) or 0 for key in NUMBERS} for found in results],
        "moved": [found.status.moved for found in results],
        "state": torch.cat(
            [v.reshape(-1) for state in optimizer.state.values() for v in state.values()]
        ),
    }


def pieces_of_a_step(sizes: Sequence[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradient, Fisher diagonal, basis, projected curvature and one evaluation of KSD."""
    model = net(dtype)
    objective = Objective(model, nn.CrossEntropyLoss())
    data = as_samples(own(classes(SAMPLES, dtype), sizes), may_be_empty=True)
    found = objective.value_gradient_and_squares(data)
    subspace = stored_krylov_basis(
        Curvature().at(objective, data).part,
        lambda v: v / found.squares.clamp(min=1e-4 * float(found.squares.max())),
        found.gradient,
        torch.linspace(-1, 1, found.gradient.numel(), dtype=dtype),
        5,
        placement=Replicated(objective.ranks, found.gradient.numel()),
        storage=Storage(),
    )
    theta = objective.parameters.copy()
    function = SpreadObjective(
        objective, data, theta, subspace, Coordinates(subspace.curvature, 1e-4)
    )
    value, gradient = function(torch.linspace(0.1, 0.2, subspace.rank, dtype=torch.float64))
    return {
        "gradient": found.gradient,
        "squares": found.squares,
        "basis": torch.stack([subspace.rows.get(k) for k in range(subspace.rank)]),
        "curvature": subspace.curvature,
        "value": torch.tensor([found.value, value, objective.value(data)]),
        "projected": gradient,
    }


def numbers_of_a_sharded_basis(dimension: int) -> int:
    """How many numbers of the basis this rank keeps."""
    n = 50
    generator = torch.Generator().manual_seed(0)
    diagonal = torch.rand(n, dtype=torch.float64, generator=generator)
    gradient = torch.randn(n, dtype=torch.float64, generator=generator)
    ranks = Ranks(torch.device("cpu"))
    subspace = stored_krylov_basis(
        lambda v: diagonal * v / ranks.size,
        torch.clone,
        gradient,
        gradient.flip(0),
        dimension,
        placement=Sharded(ranks, n),
        storage=Storage(),
    )
    assert subspace.rank == dimension + 1
    return subspace.rows._rows.numel()


# Faults -------------------------------------------------------------------------------------------


class Jitter(TorchFunctionMode):
    """Every inner product comes out a little different, as on another processor."""

    CHANGED = ("matmul", "__matmul__", "norm", "vector_norm", "mv")

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in self.CHANGED and found.dtype.is_floating_point:
            self.calls += 1
            return found * (1 + 1e-9 * (self.calls % 3))
        return found


def steps_with_jitter(name: str, sizes: Sequence[int], count: int) -> tuple[Tensor, list[int]]:
    """Steps in which rank 1 rounds differently: the parameters and evaluations on each rank."""
    model = net(torch.float64)
    optimizer = make(name, model, **({"bfgs_iterations": 30} if name == "ksd" else {}))
    data = own(classes(SAMPLES, torch.float64), sizes)
    evaluations = []
    for _ in range(count):
        if rank() == 1:
            with Jitter():
                result = optimizer.step(data)
        else:
            result = optimizer.step(data)
        evaluations.append(result.evaluations)
    return parameters_of(model), evaluations


class Trapped(nn.Module):
    """A model that does something in its forward pass, on one rank, after so many calls."""

    def __init__(self, inner: nn.Module, trap: Callable[[], None], where: int, after: int) -> None:
        super().__init__()
        self.inner, self.trap, self.where, self.left = inner, trap, where, after

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        if rank() == self.where:
            self.left -= 1
            if self.left == 0:
                self.trap()
        return found


def fail() -> None:
    raise KeyError("a sample that is not there")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(5)


def step_with_a_trap(name: str, trap: Callable[[], None], after: int) -> dict[str, Any]:
    """One step on two ranks, of which the second meets the trap; and whether a next one works."""
    model = Trapped(net(torch.float64), trap, where=1, after=10**9)
    optimizer = make(name, model)
    data = own(classes(SAMPLES, torch.float64), [30, 31, 0])
    assert optimizer.step(data).status.moved
    before, state = parameters_of(model), _state(optimizer)
    model.left = after
    told: dict[str, Any] = {"error": None}
    started = time.monotonic()
    try:
        optimizer.step(data)
    except Exception as problem:
        told = {"error": type(problem).__name__, "message": str(problem)}
    told["seconds"] = time.monotonic() - started
    told["unchanged"] = torch.equal(parameters_of(model), before)
    told["same state"] = torch.equal(_state(optimizer), state)
    if trap is fail:
        model.left = 10**9
        told["goes on"] = optimizer.step(data).status.moved
    return told


def _state(optimizer: DataOptimizer) -> Tensor:
    return torch.cat([v.reshape(-1) for state in optimizer.state.values() for v in state.values()])


def step_with_nan(name: str, bad: float) -> dict[str, Any]:
    """One step of which one rank has a sample that is not finite."""
    model = net(torch.float64)
    optimizer = make(name, model)
    inputs, targets = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    assert optimizer.step((inputs, targets)).status.moved
    before = parameters_of(model)
    broken = inputs.clone()
    if rank() == 1:
        broken[3, 1] = bad
    result = optimizer.step((broken, targets))
    return {
        "status": result.status.name,
        "unchanged": torch.equal(parameters_of(model), before),
        "goes on": optimizer.step((inputs, targets)).status.moved,
    }


def step_with_bad_data(name: str) -> str:
    """One step to which one rank gives what is no data; what each rank is told."""
    model = net(torch.float64)
    optimizer = make(name, model)
    before = parameters_of(model)
    data: Any = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    try:
        optimizer.step("no data" if rank() == 1 else data)
    except Exception as problem:
        assert torch.equal(parameters_of(model), before)
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def step_with_nothing_anywhere() -> str:
    inputs, targets = classes(3, torch.float64)
    try:
        make("ksd", net(torch.float64)).step((inputs[:0], targets[:0]))
    except ValueError as problem:
        return str(problem)
    return "nothing"


def differing(what: str) -> str:
    """One step on ranks of which the second differs; what they are told."""
    odd = rank() == 1
    model = net(torch.float32 if odd and what == "dtype" else torch.float64, seed=0)
    if odd and what == "parameters":
        with torch.no_grad():
            weight = next(model.parameters())
            weight[0, 2] += 1e-12
    if odd and what == "model":
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    name = "hf" if odd and what == "optimizer" else "ksd"
    optimizer = make(name, model, **({"dimension": 7} if odd and what == "options" else {}))
    if odd and what == "lr":
        optimizer.param_groups[0]["lr"] = 0.5
    dtype = next(model.parameters()).dtype
    try:
        optimizer.step(own(classes(SAMPLES, dtype), [30, 31]))
    except ValueError as problem:
        return str(problem)
    return "nothing"


def first_order_step() -> str:
    optimizer = FirstOrder(net(), nn.CrossEntropyLoss())
    try:
        optimizer.step(own(classes(SAMPLES), [30, 31]))
    except RuntimeError as problem:
        return str(problem)
    return "nothing"


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
    from krylov_descent.laboratory.record import RunFolder
    from krylov_descent.laboratory.runs import RunSettings, load, prepare
    from krylov_descent.laboratory.training import Limits

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
    from krylov_descent import distributed

    model = net(torch.float64)
    optimizer = make(name, model, **options)
    data = own(classes(SAMPLES, torch.float64), sizes)
    optimizer.step(data)
    ranks = optimizer.objective.ranks
    ranks.traffic.clear()
    seen: list[tuple[str, str, int]] = []

    def counted(function: Any, kind: str) -> Any:
        def call(tensor: Any, *rest: Any) -> Any:
            payload = rest[0] if kind == "reduce-scatter" else tensor
            tensors = payload if isinstance(payload, list) else [payload]
            seen.append((ranks._phase, kind, sum(t.nbytes for t in tensors)))
            return function(tensor, *rest)

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
