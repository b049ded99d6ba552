"""Errors at any function of the library in a step: nothing may be left of the step that failed.

A step calls some hundred functions of the library. Each call is a place where something may go
wrong: memory runs out, the user interrupts, data cannot be read. `sweep` raises an error at chosen
calls of a step on other data, compares all that the optimiser holds before and after, and then the
next good step with that of an optimiser that never failed, bit for bit.

The calls are counted by Python's profiling hook, so no function of the library is forgotten. Calls
made by a context manager are left out: they put things back.
"""

import copy
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import krylov_descent
from krylov_descent import KSD, LBFGS, FirstOrder, HessianFree, KroneckerFactors, NonlinearCG
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.result import StepResult

LIBRARY = str(Path(krylov_descent.__file__).parent)
LAST = "_result"  # which makes the result of a step that is done
CPU_OUT_OF_MEMORY = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"
ERRORS: Sequence[Callable[[], BaseException]] = (
    KeyboardInterrupt,
    partial(RuntimeError, CPU_OUT_OF_MEMORY),
    MemoryError,
    partial(torch.OutOfMemoryError, "CUDA out of memory."),
    partial(OSError, "the disk is gone"),
)
Data = tuple[Tensor, Tensor]
Make = Callable[[nn.Module, nn.Module], DataOptimizer]


class Averaged:
    """A user's preconditioner that goes on from one step to the next: it counts, and averages."""

    def __init__(self) -> None:
        self.updates, self.history = 0, list[int]()
        self.diagonal = torch.empty(0)

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """An average of squared gradients, in place."""
        if not self.updates:
            self.diagonal = torch.ones(objective.parameters.numel)
        found = objective.value_gradient_and_squares(data)
        self.updates += 1
        self.history.append(found.samples)
        self.diagonal.mul_(0.9).add_(found.squares, alpha=0.1)
        return found

    def solve(self, vector: Tensor) -> Tensor:
        """Divide."""
        return vector / self.diagonal

    def multiply(self, vector: Tensor) -> Tensor:
        """Multiply."""
        return vector * self.diagonal


def growing(model: nn.Module, loss: nn.Module) -> KSD:
    """KSD whose sets are parts of the data and grow, as they do for large models."""
    optimizer = KSD(model, loss, dimension=2)
    optimizer.subset_sizes = replace(optimizer.subset_sizes, least=6)
    return optimizer


def averaged(model: nn.Module, loss: nn.Module) -> KSD:
    """KSD with a preconditioner of the user's."""
    return KSD(model, loss, dimension=2, preconditioner=Averaged())


def kronecker(model: nn.Module, loss: nn.Module) -> KSD:
    """KSD whose preconditioner changes after the first step."""
    return KSD(model, loss, dimension=2, preconditioner=KroneckerFactors(after=1))


OPTIMIZERS: dict[str, Make] = {
    "KSD": growing,
    "KSD, identity": partial(KSD, dimension=2, preconditioner="identity", curvature="hessian"),
    "KSD, kronecker": kronecker,
    "KSD, a user's preconditioner": averaged,
    "HessianFree": partial(HessianFree, cg_iterations=6, chunk_size=10),
    "NonlinearCG": partial(NonlinearCG, iterations=3),
    "LBFGS": partial(LBFGS, iterations=3),
    "Adam": partial(FirstOrder, batch_size=10, schedule="linear", epochs=9),
    "SGD": partial(FirstOrder, optimizer="torch.optim.SGD", lr=0.1, momentum=0.9),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that a failed step left behind.

    Attributes:
        optimizer: by its name.
        steps: made before the one that failed.
        call: the number of the call that failed, and the function's name.
        error: that was raised there.
        what: differs.
    """

    optimizer: str
    steps: int
    call: tuple[int, str]
    error: str
    what: str


class Injection:
    """Counts the calls of the library's functions, and raises an error at one of them.

    Args:
        at: the number of that call, from 0; none by default.
        error: to raise.
    """

    def __init__(self, at: int = -1, error: BaseException | None = None) -> None:
        self._at, self._error = at, error
        self.calls: list[str] = []

    def __enter__(self) -> "Injection":
        sys.setprofile(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _watch(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(LIBRARY):
            return
        if _is_generator(frame) or frame.f_code.co_name == "__exit__":
            return
        if frame.f_back is not None and _is_generator(frame.f_back):
            return
        self.calls.append(frame.f_code.co_name)
        if self._error is not None and len(self.calls) == self._at + 1:
            raise self._error


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def sweep(
    names: Sequence[str] = tuple(OPTIMIZERS), *, points: int | None = None, seed: int = 0
) -> tuple[int, list[Difference]]:
    """Fail in steps of optimisers at random calls; how often, and all that was left behind.

    Args:
        names: of optimisers.
        points: calls for each optimiser and each of two steps, the first and the third; all of them
            by default, some thousand, which take minutes for each optimiser.
        seed: of the net, the data and the choice of calls.
    """
    failures, found = 0, list[Difference]()
    for name in names:
        for steps in (0, 2):
            calls = _calls(name, steps, seed)
            numbers = list(range(len(calls)))
            if points is not None and points < len(numbers):
                numbers = sorted(random.Random(seed).sample(numbers, points))
            expected = _next_step(_prepared(name, steps, seed), seed)
            for number in numbers:
                error = ERRORS[number % len(ERRORS)]()
                what = _left_behind(_prepared(name, steps, seed), number, error, expected, seed)
                failures += 1
                call = number, calls[number]
                found += [Difference(name, steps, call, repr(error), w) for w in what]
    return failures, found


def _calls(name: str, steps: int, seed: int) -> list[str]:
    """The functions that a step on the other data calls, until its result is made."""
    optimizer = _prepared(name, steps, seed)
    with Injection() as counted:
        optimizer.step(_data(seed + 1))
    last = len(counted.calls) - counted.calls[::-1].index(LAST)
    return counted.calls[:last]


def _left_behind(
    optimizer: DataOptimizer, number: int, error: BaseException, expected: list[Any], seed: int
) -> list[str]:
    """What differs after a step that failed, and after the good one that follows."""
    before = _everything(optimizer)
    raised: BaseException | None = None
    with Injection(number, error):
        try:
            optimizer.step(_data(seed + 1))
        except BaseException as problem:
            raised = problem
    if raised is not error:
        return [f"the error became {raised!r}"]
    after = _everything(optimizer)
    found = [f"{key} changed" for key in before if not _equal(before[key], after.get(key))]
    found += [f"{key} is new" for key in after.keys() - before.keys()]
    if not found and not _equal(_next_step(optimizer, seed), expected):
        found.append("the next step is another one")
    return found


def _next_step(optimizer: DataOptimizer, seed: int) -> list[Any]:
    """What a step on the good data leads to."""
    result: StepResult = optimizer.step(_data(seed))
    told = [getattr(result, field.name) for field in fields(result) if field.name != "seconds"]
    return [told, list(_everything(optimizer).values())]


def _everything(optimizer: DataOptimizer) -> dict[str, Any]:
    """Copies of all that a user can see of a model and its optimiser."""
    model = optimizer.objective.network.model
    found: dict[str, Any] = dict(model.state_dict())
    found |= {f"grad of {name}": p.grad for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        kept = optimizer.state.get(p, {})
        found |= {f"{key} of {name}": value for key, value in kept.items()}
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"{key} of group {i}": v for key, v in group.items() if key != "params"}
    if isinstance(optimizer, KSD) and isinstance(optimizer.preconditioner, Averaged):
        found |= vars(optimizer.preconditioner)
    found["scale"] = optimizer.objective.scale, optimizer.objective.network.scale
    found["torch"] = torch.is_grad_enabled(), torch.backends.cuda.matmul.fp32_precision
    return copy.deepcopy(found)


def _equal(a: Any, b: Any) -> bool:
    """Bit for bit; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and torch.equal(_bits(a), _bits(b))
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and (a == b or repr(a) == repr(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _prepared(name: str, steps: int, seed: int) -> DataOptimizer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = OPTIMIZERS[name](model, nn.MSELoss())
    for _ in range(steps):
        optimizer.step(_data(seed))
    return optimizer


def _data(seed: int) -> Data:
    """More samples for the second one of a pair, so that it differs in all that is measured."""
    generator = torch.Generator().manual_seed(seed)
    count = 24 + 8 * (seed % 2)
    return (
        torch.randn(count, 4, generator=generator),
        torch.randn(count, 2, generator=generator),
    )
