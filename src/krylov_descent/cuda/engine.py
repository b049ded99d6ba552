"""An engine that records the work of a step once and replays the recording.

`RecordingEngine` takes any function that records; `CudaEngine` records CUDA graphs. Each
`graphs/record_*.py` records one kind of work. Work that cannot be recorded runs eagerly.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from krylov_descent.cuda.graphs.capture import capture_graph, is_large
from krylov_descent.cuda.graphs.record_basis import launch_basis
from krylov_descent.cuda.graphs.record_damped_basis import launch_damped_basis
from krylov_descent.cuda.graphs.record_factors import launch_factors
from krylov_descent.cuda.graphs.record_gradient import launch_gradient, launch_mini_batch
from krylov_descent.cuda.graphs.record_product import launch_linearization
from krylov_descent.cuda.graphs.record_search import launch_search
from krylov_descent.cuda.graphs.recorder import Recorder
from krylov_descent.cuda.triton.availability import availability
from krylov_descent.curvature.damped_basis import DampedBasis
from krylov_descent.curvature.krylov_basis import KrylovBasis
from krylov_descent.curvature.preconditioners.kronecker import FactorsOfBatches
from krylov_descent.curvature.products import Linearization
from krylov_descent.objective.mini_batch import MiniBatch
from krylov_descent.objective.objective import MeanGradient, MeanSquares, Objective
from krylov_descent.objective.search_objective import Search
from krylov_descent.runtime.engine import Launched, Result, Work

LAUNCHERS: dict[type, Callable[[Any, Any], Launched[Any]]] = {
    MeanGradient: launch_gradient,
    MeanSquares: launch_gradient,
    MiniBatch: launch_mini_batch,
    Linearization: launch_linearization,
    FactorsOfBatches: launch_factors,
    KrylovBasis: launch_basis,
    DampedBasis: launch_damped_basis,
    Search: launch_search,
}


class RecordingEngine(Recorder):
    """Records each kind of work in `LAUNCHERS` and replays it.

    Args:
        objective: the objective whose work is run.
        capture: records a function.
    """

    def launch(self, work: Work[Result]) -> Launched[Result]:
        launcher = LAUNCHERS.get(type(work)) if self.possible else None
        return super().launch(work) if launcher is None else launcher(self, work)


class CudaEngine(RecordingEngine):
    """Records work as CUDA graphs; possible only if the parameters are on a CUDA device.

    Args:
        objective: the objective whose work is run.
    """

    def __init__(self, objective: Objective) -> None:
        super().__init__(objective, capture_graph)
        self._kernels_came_late = False
        if self.possible and is_large(objective.network):
            availability(objective.parameters.device)  # loads the kernels in another thread

    @property
    def possible(self) -> bool:
        return super().possible and self.objective.parameters.device.type == "cuda"

    def finish(self) -> None:
        torch.cuda.current_stream(self.objective.parameters.device).synchronize()

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.possible and is_large(self.objective.network):
            self._update_kernels()
        with super().step():
            yield

    def _update_kernels(self) -> None:
        """Record anew if the tensor-core kernels have been compiled since the last step."""
        kernels = availability(self.objective.parameters.device)
        kernels.update()
        if kernels.came_late and not self._kernels_came_late:
            self.graphs.clear()
            self._kernels_came_late = True
