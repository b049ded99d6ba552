"""What goes wrong on a rank, and what all of them are told then."""

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from krylov_descent import KSD, FirstOrder, KroneckerFactors
from krylov_descent.algorithms.basis_storage import StoredBasis
from krylov_descent.curvature.preconditioners.preconditioner import FisherDiagonal
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.optimizers.base import DataOptimizer
from tests.distributed.work import OPTIONS, SAMPLES, Data, make, own, rank
from tests.optimizers.nets import classes, net, parameters_of

SLEEP = 8.0  # seconds, of a rank that the others do not wait for
SOON = 5.0  # seconds, much less than the timeout of the tests' groups


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


class Brittle:
    """D = 2, of which one method fails on some ranks when it is told to."""

    def __init__(self, where: Sequence[int]) -> None:
        self._where, self._fails_in = where, ""

    def fail_in(self, method: str) -> None:
        self._fails_in = method

    def _meet(self, method: str) -> None:
        if rank() in self._where and method == self._fails_in:
            raise ArithmeticError(f"{method} does not work on rank {rank()}")

    def update(self, objective: Objective, data: Any) -> Evaluation:
        self._meet("update")
        return objective.value_and_gradient(data)

    def solve(self, vector: Tensor) -> Tensor:
        self._meet("solve")
        return vector / 2

    def multiply(self, vector: Tensor) -> Tensor:
        self._meet("multiply")
        return 2 * vector


def step_with_a_preconditioner_that_fails(method: str, where: Sequence[int]) -> dict[str, Any]:
    """A second step, as only that one multiplies."""
    model, preconditioner = net(torch.float64), Brittle(where)
    optimizer = make("ksd", model, preconditioner=preconditioner)
    data = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    optimizer.step(data)
    preconditioner.fail_in(method)
    told = told_of_a_step(optimizer, data)
    preconditioner.fail_in("")
    return told | {"goes on": optimizer.step(data).status.moved}


def step_without_room_for_the_basis() -> dict[str, Any]:
    model = net(torch.float64)
    optimizer = make("ksd", model)
    data = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(StoredBasis, "__init__", without_room)
        told = told_of_a_step(optimizer, data)
    return told | {"goes on": optimizer.step(data).status.moved}


def without_room(*_: Any) -> None:
    raise torch.OutOfMemoryError("tried to allocate 3 GiB")


class Shy(nn.Tanh):
    """An activation that does not say on rank 1 what it is."""

    def extra_repr(self) -> str:
        if rank() == 1:
            raise LookupError("nobody knows")
        return ""


def step_with_a_check_that_fails() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 6), Shy(), nn.Linear(6, 3)).double()
    data = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    return told_of_a_step(make("ksd", model), data)


def told_of_a_step(optimizer: DataOptimizer, data: Any, **sets: Any) -> dict[str, Any]:
    """A step that fails: with what error, and whether soon and without a trace."""
    parameters = optimizer.objective.parameters
    before, started = parameters.copy(), time.monotonic()
    told = {"error": "", "message": ""}
    try:
        optimizer.step(data, **sets)
    except Exception as problem:
        told = {"error": type(problem).__name__, "message": str(problem)}
    soon = time.monotonic() - started < SOON
    return told | {"soon": soon, "unchanged": torch.equal(parameters.copy(), before)}


def step_without_data(name: str, how: str) -> dict[str, Any]:
    """A step on ranks of which the second gives None, or a closure; or all of them do."""
    optimizer = make(name, net(torch.float64))
    data: Any = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    if how == "None everywhere":
        return {"returned": optimizer.step(None), "states": len(optimizer.state)}
    if rank() == 1:
        data = None if how == "None" else fail
    return told_of_a_step(optimizer, data)


def state_for_a_checkpoint() -> int:
    """As checkpoint tools make it, on one rank alone."""
    optimizer = make("ksd", net(torch.float64))
    if rank() == 1:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.zeros_like(p)
        optimizer.step(closure=None)
    return len(optimizer.state)


class Worn(Dataset[Any]):
    """Samples that can be had once each, and then no more on one rank."""

    def __init__(self, data: Data, where: int) -> None:
        self._data, self._where, self._left = data, where, len(data[0])

    def __len__(self) -> int:
        return len(self._data[0])

    def __getitem__(self, index: int) -> Any:
        self._left -= 1
        if self._left < 0 and rank() == self._where:
            raise KeyError("a sample that is not there")
        return self._data[0][index], self._data[1][index]


def step_with_nan_and_an_error(name: str, nan: int, error: int) -> dict[str, Any]:
    """One rank has a NaN in the gradient, another an error as it draws samples afterwards."""
    inputs, targets = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    if rank() == nan:
        inputs[2, 1] = torch.nan
    optimizer = make(name, net(torch.float64))
    return told_of_a_step(optimizer, Worn((inputs, targets), error))


def sets_on_one_rank(which: str) -> dict[str, Any]:
    """One step to which the second rank gives B, or C, by hand."""
    data = own(classes(SAMPLES, torch.float64), [30, 20, 11])
    sets = {which: data} if rank() == 1 else {}
    name = "hf" if which == "chunk" else "ksd"
    sets = {"curvature_data" if which == "chunk" else key: held for key, held in sets.items()}
    return told_of_a_step(make(name, net(torch.float64)), data, **sets)


def step_with_nothing_anywhere() -> str:
    inputs, targets = classes(3, torch.float64)
    try:
        make("ksd", net(torch.float64)).step((inputs[:0], targets[:0]))
    except ValueError as problem:
        return str(problem)
    return "nothing"


class Wrapped(nn.Module):
    """A loss with an argument of its own."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.power = power

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="none") ** self.power


def doubled(model: nn.Module, inputs: Tensor) -> Tensor:
    found: Tensor = model(2 * inputs)
    return found


def of_another_loss(what: str, odd: bool) -> str:
    """One step of ranks that differ in what the loss depends on beside what is trained."""
    model = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU() if odd and what == "activation" else nn.Tanh(), nn.Linear(6, 3)
    ).double()
    model.register_buffer("statistics", torch.arange(6.0))
    loss: Any = nn.CrossEntropyLoss()
    forward: Any = None
    weight = next(model.parameters())
    with torch.no_grad():
        if what == "frozen":
            weight.requires_grad_(False)
            weight[1, 2] += odd * 1e-9
        elif what == "swapped" and odd:
            weight[0, 1:3] = weight[0, 1:3].flip(0).clone()
        elif what == "buffer" and odd:
            model.get_buffer("statistics")[3] = -1
    if what == "smoothing":
        loss = nn.CrossEntropyLoss(label_smoothing=0.1 * odd)
    elif what == "class weights":
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 1.0 + odd]).double())
    elif what == "argument":
        loss = Wrapped(1.0 + odd)
    elif what == "partial":
        loss = partial(nn.functional.cross_entropy, reduction="none", ignore_index=-int(odd))
    elif what == "forward" and odd:
        forward = doubled
    preconditioner = FisherDiagonal(1e-3 if odd and what == "floor" else 1e-4)
    options = OPTIONS["ksd"] | {"forward": forward, "preconditioner": preconditioner}
    optimizer = KSD(model, loss, **options)
    return str(told_of_a_step(optimizer, own(classes(SAMPLES, torch.float64), [30, 31]))["message"])


def differing_besides(what: str) -> str:
    return of_another_loss(what, rank() == 1)


def steps_with_another_last_bit(name: str, count: int) -> list[tuple[float, float]]:
    """Steps in which the L2 term of rank 1 is the next larger number; losses and what is learnt."""
    model = net(torch.float64)
    options = {"subset_size": "auto"} if name == "ksd" else {}
    optimizer = make(name, model, **options)
    data = own(classes(SAMPLES, torch.float64), [30, 31])
    exact = FlatParameters.decay_value

    def rounded_up(parameters: FlatParameters) -> float:
        return math.nextafter(exact(parameters), math.inf)

    found = []
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(FlatParameters, "decay_value", rounded_up)
        for _ in range(count):
            result = optimizer.step(data)
            group = optimizer.param_groups[0]
            if rank() == 1:  # as if they had been computed there
                for key in ("set_expected", "promised", "damping"):
                    if key in group:
                        group[key] = math.nextafter(group[key], math.inf)
            found.append((result.loss, result.loss_after))
    found.append((float(parameters_of(model).sum()), 0.0))
    return found


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
