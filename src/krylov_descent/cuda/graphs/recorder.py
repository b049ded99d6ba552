"""What all recorded work has in common: what was recorded, and whether that is still right."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from krylov_descent.cuda.graphs.capture import Capture
from krylov_descent.cuda.graphs.graph_cache import GraphCache
from krylov_descent.cuda.graphs.staleness import PULSE, Staleness
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.search_objective import SearchObjective
from krylov_descent.runtime.engine import Engine, StaleError

# Bytes of parameters. In larger models kernels are long enough to hide their launches, and memory
# is dearer.
LARGEST_MODEL = 16 << 20
# Bytes of activations, which a recording holds on to. With more of them kernels are long, too.
LARGEST_ACTIVATIONS = 1 << 30
# Recordings that are the same for every preconditioner.
EVALUATION, NOISE, STEP = "evaluation", "noise", "step"
STALE = "the model does not compute any more what was recorded of it"


class Recorder(Engine):
    """An engine that records; how each piece of work is recorded is decided by its heirs.

    Args:
        objective: whose work it runs.
        capture: records a function.

    Attributes:
        objective: as given.
        graphs: what was recorded.
        staleness: whether that is what the model computes.
        settled_at: how often recordings had been found stale when squares were last made plainly.
        basis_slots: the rows [K + m, n] of the basis of this step, where the engine made it.
        open_search: the search that was launched in this step, and may have written to parameters.
    """

    def __init__(self, objective: Objective, capture: Capture) -> None:
        self.objective = objective
        self.graphs = GraphCache(objective.network, capture)
        self.staleness = Staleness(objective.network, self.graphs)
        self.settled_at = 0
        self.basis_slots: Tensor | None = None
        self.open_search: SearchObjective | None = None
        self._trusted: list[Batch] = []  # whose recordings were taken to be fresh, unverified
        self._was_repeatable = False  # until `verify`

    @property
    def possible(self) -> bool:
        """Whether this model is one to record."""
        parameters = self.objective.parameters
        return parameters.numel * parameters.tensors[0].element_size() <= LARGEST_MODEL

    def fits(self, batch: Batch, *, times: int = 1) -> bool:
        """Whether a forward and backward pass over a batch may be recorded.

        Args:
            batch: of samples.
            times: how often, side by side.
        """
        size = times * batch.size
        activations = size * self.objective.findings.bytes_per_sample
        return size <= self.objective.micro_batch and activations <= LARGEST_ACTIVATIONS

    def are_fresh(self, batch: Batch, losses: Tensor | None = None) -> bool:
        """Whether recordings are what the model computes; forgets them if not.

        In a step that can be made again they are taken to be fresh: `verify` has the answer.

        Args:
            batch: whose first samples are compared.
            losses: see `Staleness.compare`.

        Raises:
            StaleError: behind `verify`, to which earlier samples had told nothing.
        """
        if not self.in_step:
            self.staleness.begin_step()
        self.staleness.compare(batch, losses, later=self.repeatable)
        if self.repeatable:
            self._trusted.append(batch)
            return True
        if self.staleness.answer():
            return True
        if self._was_repeatable:
            raise StaleError(STALE)
        self.graphs.forget()
        return False

    def verify(self) -> None:
        self._was_repeatable, self.repeatable = self.repeatable, False
        trusted, self._trusted = self._trusted, []
        fresh = self.staleness.answer()
        for batch in trusted:  # does nothing unless those before told nothing
            self.staleness.compare(batch)
            fresh = self.staleness.answer() and fresh
        if not fresh:
            raise StaleError(STALE)

    @contextmanager
    def step(self) -> Iterator[None]:
        self.staleness.begin_step()
        with super().step(), self.graphs.step():
            try:
                yield
            finally:
                self._trusted, self._was_repeatable = [], False
                self.basis_slots, search, self.open_search = None, self.open_search, None
                if search is not None:  # nobody had use for it
                    search.restore()
                    self.finish()

    def finish(self) -> None:
        """Wait for all that was launched."""

    def clear(self) -> None:
        self.graphs.clear()
        self.staleness.clear()

    def change_preconditioner(self) -> None:
        pulses = [name for name in self.graphs.names if name.startswith(PULSE)]
        self.graphs.release(but=(EVALUATION, NOISE, STEP, *pulses))
