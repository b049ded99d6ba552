"""The engines that one suite of tests runs over.

- eager: each piece of work as it is; the reference.
- tape: the engine of GPUs on a CPU, with a tape in place of CUDA graphs.
- cuda: CUDA graphs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from krylov_descent.cuda.engine import RecordingEngine
from krylov_descent.cuda.graphs.capture import Recorded
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


def use(engine: str, optimizer: DataOptimizer) -> DataOptimizer:
    """Have an optimiser run its work by an engine."""
    if engine == "tape":
        optimizer._plain_engine = RecordingEngine(optimizer.objective, record_on_tape)
    elif engine == "eager":
        optimizer._cuda_graphs = False
    return optimizer
