"""What ranks do with torch's own wrappers and checkpoints."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from krylov_descent import KSD
from krylov_descent.optimizers.base import DataOptimizer
from tests.distributed.work import SAMPLES, make, own
from tests.optimizers.nets import classes, net, parameters_of

SIZES = {1: [61], 2: [20, 41], 3: [30, 0, 31]}


def data() -> tuple[Tensor, Tensor]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    return own(classes(SAMPLES, torch.float64), SIZES[size])


def step_in_ddp() -> tuple[Tensor, Tensor]:
    """The parameters after two steps, of a model inside DDP and of a bare one."""
    inside, bare = net(torch.float64), net(torch.float64)
    wrapper = DistributedDataParallel(inside)
    for optimizer in (make("ksd", wrapper), make("ksd", bare)):
        for _ in range(2):
            assert optimizer.step(data()).status.moved
    return parameters_of(inside), parameters_of(bare)


def make_with_fsdp() -> str:
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        KSD(model, nn.CrossEntropyLoss())
    except TypeError as problem:
        return str(problem)
    return "nothing"


def _state(model: nn.Module, optimizer: DataOptimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def save_and_go_on(name: str, path: Path) -> Tensor:
    """Two steps, a checkpoint, and the parameters after one step more."""
    model = net(torch.float64)
    optimizer = make(name, model)
    for _ in range(2):
        assert optimizer.step(data()).status.moved
    state_dict_saver.save(_state(model, optimizer), checkpoint_id=path)
    assert optimizer.step(data()).status.moved
    return parameters_of(model)


def load_and_go_on(name: str, path: Path) -> Tensor:
    """The parameters one step after the checkpoint, from other ones."""
    model = net(torch.float64, seed=5)
    optimizer = make(name, model)
    state = _state(model, optimizer)
    state_dict_loader.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.step(data()).status.moved
    return parameters_of(model)
