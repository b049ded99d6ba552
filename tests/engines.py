"""The engines that one suite of tests runs over.

- eager: each piece of work as it is; the reference.
- tape: the engine of GPUs on a CPU, with a tape in place of CUDA graphs.
- cuda: CUDA graphs.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
import torch

from krylov_descent import Objective, StepResult
from krylov_descent.cuda.engine import CudaEngine, RecordingEngine
from krylov_descent.cuda.graphs.capture import Capture, Recorded
from krylov_descent.objective.network import Network
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.runtime.ops import Operations
from krylov_descent.runtime.ops import use as use_operations
from tests.tape import Tape

ENGINES = [
    "eager",
    "tape",
    pytest.param("cuda", marks=pytest.mark.gpu),
]
# Those that are compared with the eager one.
RECORDING = ENGINES[1:]

Optimizer = TypeVar("Optimizer", bound=DataOptimizer)


class TapeOperations(Operations):
    """Torch's, while no number can be read."""

    may_read = False


def record_on_tape(
    network: Network,
    function: Callable[[], Any],
    *,
    rehearsal: Callable[[], Any],
    after: Recorded[Any] | None = None,
    foreign: bool = False,
) -> Recorded[Any]:
    """Record a function on a tape; see `capture.Capture`."""
    with use_operations(TapeOperations()):
        tape = Tape.record(function)
    return Recorded(tape, tape.result)


def device_of(engine: str) -> torch.device:
    """Where a model is for an engine to be used."""
    return torch.device("cuda" if engine == "cuda" else "cpu")


def use(engine: str, optimizer: Optimizer, capture: Capture = record_on_tape) -> Optimizer:
    """Have an optimiser run its work by an engine.

    Args:
        engine: its name.
        optimizer: whose model is on the engine's device.
        capture: records for the engine "tape".
    """
    if engine == "tape":
        optimizer._plain_engine = RecordingEngine(optimizer.objective, capture)
    elif engine == "eager":
        optimizer._cuda_graphs = False
    return optimizer


def engine_of(optimizer: DataOptimizer) -> RecordingEngine:
    """The engine that an optimiser's steps are run by, which records."""
    engine = optimizer._engine()
    assert isinstance(engine, RecordingEngine)
    return engine


def objective_on(engine: str, *args: Any, **options: Any) -> Objective:
    """An objective whose work is run by an engine, outside of steps."""
    objective = Objective(*args, **options)
    if engine == "tape":
        objective.engine = RecordingEngine(objective, record_on_tape)
    elif engine == "cuda":
        objective.engine = CudaEngine(objective)
    return objective


def recorded_in(objective: Objective) -> list[str]:
    """The names of what the engine of an objective has recorded."""
    assert isinstance(objective.engine, RecordingEngine)
    return objective.engine.graphs.names


def check_alike(
    found: Sequence[StepResult], expected: Sequence[StepResult], rel: float = 1e-9
) -> None:
    """Steps that took the same work exactly, and found the same numbers to rounding."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.status is theirs.status, (ours.reason, theirs.reason)
        for name in ("rank", "products", "iterations", "evaluations", "samples", "graphs_kept"):
            assert getattr(ours, name) == getattr(theirs, name), name
        for name in ("loss", "loss_before", "loss_after", "gradient_norm", "step_norm", "passes"):
            numbers = getattr(ours, name), getattr(theirs, name)
            assert numbers[0] == pytest.approx(numbers[1], rel=rel, nan_ok=True), name
