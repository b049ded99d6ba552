"""The methods of the road test, and the settings that each may choose from."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.environment import UnavailableError, version_of
from benchmarks.road.problem import RoadProblem, Task
from benchmarks.target.mini_batches import MiniBatches
from benchmarks.target.updates import make_update
from krylov_descent import KSD, LBFGS, HessianFree
from krylov_descent.optimizers.true_end import truly_ended

Setting = dict[str, Any]
# Makes one step of training, or one epoch, given the part of the time that is left; returns whether
# the step was refused and whether nothing is left to gain.
Stepper = Callable[[float], tuple[bool, bool]]
RATES: tuple[Setting, ...] = tuple({"rate": rate} for rate in (1e-3, 3e-3, 1e-2, 3e-2))
GRID: tuple[Setting, ...] = tuple(
    {"dimension": dimension, "preconditioner": preconditioner}
    for dimension, preconditioner in itertools.product(
        (20, 80), ("identity", "fisher-diagonal", "kronecker")
    )
)


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        title: what tables call it.
        settings: those that are tried with the first seed; the best one is taken for the others.
        distribution: that it needs.
        gpu_only: whether it takes part on GPUs alone.
    """

    title: str
    settings: tuple[Setting, ...] = ({},)
    distribution: str | None = None
    gpu_only: bool = False

    def require(self) -> None:
        """Say so where its library is not installed."""
        if self.distribution and version_of(self.distribution) is None:
            raise UnavailableError(f"{self.distribution} is not installed")


DEFAULT, BEST = "ksd", "ksd-grid"
METHODS: dict[str, Method] = {
    DEFAULT: Method("KSD"),
    BEST: Method("KSD, best of a grid", GRID),
    # Nothing is regularised here, so AdamW would be Adam.
    "adam": Method("Adam", RATES),
    "soap": Method("SOAP", RATES, "pytorch_optimizer"),
    # Its products are in bfloat16, which many CPUs only emulate.
    "muon": Method("Muon", RATES, gpu_only=True),
    "lbfgs": Method("L-BFGS"),
    "hf": Method("HF"),
}
SECOND_ORDER: dict[str, Any] = {DEFAULT: KSD, BEST: KSD, "lbfgs": LBFGS, "hf": HessianFree}


def methods_of(kind: str) -> list[str]:
    """The methods that take part on a kind of device."""
    return [name for name, method in METHODS.items() if kind == "cuda" or not method.gpu_only]


def stepper(
    method: str, problem: RoadProblem, task: Task, setting: Setting, seconds: float, seed: int
) -> Stepper:
    """A method at its start."""
    if method in SECOND_ORDER:
        return _second_order(SECOND_ORDER[method](task.model, task.loss, **setting), task)
    recorded = task.inputs.is_cuda
    update = make_update(method, task.model, 0.0, recorded=recorded)
    rate = setting["rate"]
    batches = MiniBatches(
        task.model,
        task.sample_losses,
        update,
        batch_size=problem.batch_size or len(task.inputs),
        rate=rate,
        seconds=seconds,
        decay=seconds,
        seed=seed,
        recorded=recorded,
    )

    def epoch(left: float) -> tuple[bool, bool]:
        update.set_rate(rate * left)
        batches.epoch((task.inputs, task.targets), seconds=left * seconds)
        return False, False

    return epoch


def _second_order(optimizer: Any, task: Task) -> Stepper:
    data, first = (task.inputs, task.targets), list[float]()
    dtype = next(task.model.parameters()).dtype

    def step(left: float) -> tuple[bool, bool]:
        del left
        result = optimizer.step(data)
        first.append(result.loss)
        return not result.status.moved, truly_ended(result, first[0], dtype)

    return step
