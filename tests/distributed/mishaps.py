"""What goes wrong on a rank, and what all of them are told then."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from krylov_descent import FirstOrder, KroneckerFactors
from krylov_descent.optimizers.base import DataOptimizer
from tests.distributed.work import SAMPLES, make, own, rank
from tests.optimizers.nets import classes, net, parameters_of

SLEEP = 8.0  # seconds, of a rank that the others do not wait for


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
    time.sleep(SLEEP)


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
    options: dict[str, Any] = {"dimension": 7} if odd and what == "options" else {}
    if what == "preconditioner":
        options = {"preconditioner": KroneckerFactors(after=int(odd))}
    optimizer = make(name, model, **options)
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
