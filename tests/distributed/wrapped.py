"""What ranks do with torch's own wrappers and checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from krylov_descent import KSD
from krylov_descent.optimizers.base import DataOptimizer
from tests.distributed.work import SAMPLES, make, own
from tests.optimizers.nets import classes, net, parameters_of

SIZES = {1: [61], 2: [20, 41], 3: [30, 0, 31]}


def data() -> tuple[Tensor, Tensor]:
    size = dist.get_world_size() if dist.is_initialized() else 1
    return own(classes(SAMPLES, torch.float64), SIZES[size])


def _sequence() -> nn.Sequential:
    """Always the same, with buffers: DDP broadcasts them in every forward pass."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(6)
    norm.running_mean = torch.linspace(-0.2, 0.2, 6)
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 3))
    return model.double().eval()


def _with_child(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    """The same, of which the first three layers are one wrapped child."""
    layers = list(_sequence())
    return nn.Sequential(wrap(nn.Sequential(*layers[:3])), layers[3])


def _compiled(model: nn.Module) -> nn.Module:
    found: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return found


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DDP": lambda: DistributedDataParallel(_sequence()),
    "compiled DDP": lambda: _compiled(DistributedDataParallel(_sequence())),
    "DDP of compiled": lambda: DistributedDataParallel(_compiled(_sequence())),
    "DDP inside": lambda: _with_child(DistributedDataParallel),
    "DDP inside of compiled": lambda: _compiled(_with_child(DistributedDataParallel)),
    "replicate": lambda: replicate(_sequence()),
    "replicate inside": lambda: _with_child(replicate),
}


def steps_of_wrapped(case: str, name: str) -> tuple[Tensor, Tensor]:
    """The parameters after two steps, of a wrapped model and of a bare one.

    Three ranks make 5, 0 and 5 forward passes in each walk over their data.
    """
    found = []
    for model in (WRAPPED[case](), _sequence()):
        optimizer = make(name, model, micro_batch=7)
        for _ in range(2):
            assert optimizer.step(data()).status.moved
        found.append(parameters_of(model))
    return found[0], found[1]


def ddp_is_ddp_again() -> list[bool]:
    """Whether a DDP inside the model still broadcasts buffers and sums gradients of its own."""
    model: Any = _with_child(DistributedDataParallel)
    assert make("ksd", model).step(data()).status.moved
    mean = model[0].module[1].running_mean
    mean.fill_(float(dist.get_rank()))
    inputs, targets = data()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    gradient = model[0].module[0].weight.grad
    everyone = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, gradient)
    return [bool((mean == 0).all()), torch.equal(everyone[0], everyone[1])]


def _told_at_construction(model: nn.Module) -> str:
    try:
        KSD(model, nn.CrossEntropyLoss())
    except TypeError as problem:
        return str(problem)
    return "nothing"


def _fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def make_with_sharded(case: str) -> str:
    """What is said of a model whose parameters are divided among the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = net()
    if case == "FSDP2":
        fully_shard(model, mesh=mesh)
    elif case == "FSDP1":
        model = _fsdp1(model, use_orig_params=True)
    elif case == "FSDP1 inside":
        model[0] = _fsdp1(model[0])
    else:
        parallelize_module(model, mesh, {"0": ColwiseParallel()})
        if case == "frozen tensor parallel":
            model[0].requires_grad_(False)
    return _told_at_construction(model)


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
