"""What ranks are asked to do; each function also runs in one process without a group."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from krylov_descent import KSD, HessianFree, NonlinearCG
from krylov_descent.optimizers.base import DataOptimizer
from tests.optimizers.nets import classes, net, parameters_of

OPTIMIZERS: dict[str, Any] = {"ksd": KSD, "hf": HessianFree, "ncg": NonlinearCG}
# Small enough for several iterations of each method in a fraction of a second.
OPTIONS: dict[str, dict[str, Any]] = {
    "ksd": {"dimension": 6, "subset_size": (20, 24)},
    "hf": {"cg_iterations": 12, "chunk_size": 25},
    "ncg": {"iterations": 3},
}
SAMPLES = 61
Data = tuple[Tensor, Tensor]


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def own(data: Data, sizes: Sequence[int]) -> Data:
    """The shard of this rank, where shards have these sizes; everything in one process."""
    if not dist.is_initialized():
        return data
    start = sum(sizes[: dist.get_rank()])
    stop = start + sizes[dist.get_rank()]
    return data[0][start:stop], data[1][start:stop]


def make(name: str, model: nn.Module, **options: Any) -> DataOptimizer:
    kind, settings = OPTIMIZERS[name], {**OPTIONS[name], **options}
    optimizer: DataOptimizer = kind(model, nn.CrossEntropyLoss(), weight_decay=1e-3, **settings)
    return optimizer


def steps(
    name: str,
    options: dict[str, Any],
    sizes: Sequence[int],
    count: int = 1,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Some steps; what they led to."""
    model = net(dtype)
    optimizer = make(name, model, **options)
    data = own(classes(SAMPLES, dtype), sizes)
    results = [optimizer.step(data) for _ in range(count)]
    return {
        "parameters": parameters_of(model),
        "results": [
            {
                key: getattr(result, key)
                for key in (
                    *("loss", "loss_before", "loss_after", "gradient_norm", "step_norm"),
                    *("rank", "samples", "curvature_samples", "objective_samples", "iterations"),
                    *("evaluations", "products", "passes", "damping", "noise"),
                )
            }
            | {"status": result.status.name}
            for result in results
        ],
        "state": [
            {key: value for key, value in state.items()} for state in optimizer.state.values()
        ],
    }
