"""What ranks do in process groups that are not that of all processes, and in groups that change."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from krylov_descent import KSD
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.base import DataOptimizer
from tests.distributed.work import SAMPLES, make, rank
from tests.optimizers.nets import classes, net, parameters_of

MEMBERS = [[0, 2], [1, 3]]  # so that no rank of the second group has its number in the group
SIZES = [20, 41]


def _group() -> Any:
    """That of this rank, of two ranks; all four must call it."""
    return [dist.new_group(members) for members in MEMBERS][rank() % 2]


def _own(samples: int) -> tuple[Tensor, Tensor]:
    """The part of this rank of the data of its group."""
    part = slice(SIZES[0]) if rank() // 2 == 0 else slice(SIZES[0], None)
    inputs, targets = classes(samples, torch.float64)
    return inputs[part], targets[part]


def steps_in_two_groups(name: str, mesh: bool) -> Tensor:
    """Two groups of two ranks, each with a model and data of its own, at the same time.

    Args:
        name: of the optimiser.
        mesh: give a dimension of a mesh in place of a group.
    """
    if mesh:
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))["data"]
    else:
        group = _group()
    seed = rank() % 2
    return _two_steps(name, seed, _own(SAMPLES + seed), group)


def steps_alone(name: str, seed: int) -> Tensor:
    """What one process makes of the model and data of a group."""
    return _two_steps(name, seed, classes(SAMPLES + seed, torch.float64), None)


def _two_steps(name: str, seed: int, data: tuple[Tensor, Tensor], group: Any) -> Tensor:
    model = net(torch.float64, seed=seed)
    optimizer = make(name, model, process_group=group)
    for _ in range(2):
        assert optimizer.step(data).status.moved
    return parameters_of(model)


def value_in_group() -> float:
    """The value of an objective of the user's, over the samples of two ranks."""
    objective = Objective(net(torch.float64), nn.CrossEntropyLoss(), process_group=_group())
    return objective.value(_own(SAMPLES))


def told(action: Callable[[], Any]) -> str:
    """The error of an action, in words."""
    try:
        action()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def make_with_wrong_groups() -> list[str]:
    """What is said of a group that the rank is not in, of a mesh of two dimensions, of a word."""
    outside = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))

    groups: list[Any] = [outside, mesh, "world"]
    make_with = partial(KSD, net(), nn.CrossEntropyLoss())
    return [told(partial(make_with, process_group=group)) for group in groups]


def copies_in_a_group() -> dict[str, Any]:
    """What a copy of an optimiser, and one with its state, do at the next step."""
    model, group, data = net(torch.float64), _group(), _own(SAMPLES)
    optimizer = make("ksd", model, process_group=group)
    optimizer.step(data)
    twin_model, twin = copy.deepcopy((model, optimizer))
    loaded_model = copy.deepcopy(model)
    loaded = make("ksd", loaded_model, process_group=group)
    loaded.load_state_dict(optimizer.state_dict())
    for each in (optimizer, twin, loaded):
        each.step(data)
    found = [parameters_of(each) for each in (model, twin_model, loaded_model)]
    return {
        "alike": all(torch.equal(found[0], other) for other in found),
        "pickled": told(lambda: pickle.dumps(optimizer)),
    }


def steps_in_a_group_of_one(name: str) -> tuple[Tensor, bool]:
    """Each rank by itself: the parameters, and whether anything was sent."""
    group = [dist.new_group([member]) for member in range(dist.get_world_size())][rank()]
    model = net(torch.float64)
    optimizer = make(name, model, process_group=group)
    for _ in range(2):
        assert optimizer.step(classes(SAMPLES, torch.float64)).status.moved
    return parameters_of(model), bool(optimizer.objective.ranks.traffic)


def steps_while_the_group_changes(folder: Path) -> dict[str, str]:
    """What is said at a step after the group of three went, came again, and lost a rank.

    Nothing is left of the group that the ranks came with.
    """
    own, size = dist.get_rank(), dist.get_world_size()
    data = classes(SAMPLES, torch.float64)

    def join(name: str, size: int) -> None:
        store = f"file://{folder / name}"
        dist.init_process_group("gloo", init_method=store, rank=own, world_size=size)

    def made() -> DataOptimizer:
        return make("ksd", net(torch.float64))

    def step(optimizer: DataOptimizer) -> str:
        return told(lambda: optimizer.step(data))

    three = made()
    in_a_group = make("ksd", net(torch.float64), process_group=dist.group.WORLD)
    found = {"in three": step(three)}
    dist.destroy_process_group()
    found["gone"] = step(three)
    alone = made()
    found["alone"] = step(alone)
    join("three", size)
    found["alone, then three"] = step(alone)
    found["three again"] = step(three)
    found["another of three"] = step(in_a_group)
    dist.destroy_process_group()
    if own < 2:
        join("two", 2)
        found["of two"] = step(three)
        found["anew"] = step(made())
    return found
