"""State shared by all recorded work: the cached graphs, and whether they are stale."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from krylov_descent.cuda.graphs.basis_room import BasisRoom
from krylov_descent.cuda.graphs.capture import Capture
from krylov_descent.cuda.graphs.graph_cache import GraphCache
from krylov_descent.cuda.graphs.staleness import PULSE, Staleness
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.search_objective import SearchObjective
from krylov_descent.runtime.engine import Engine, StaleError

# Bytes of parameters. Larger models have kernels that are long enough to hide their launches, and
# need the memory.
LARGEST_MODEL = 16 << 20
# Bytes of activations, which a recording keeps allocated. With more, kernels hide their launches.
LARGEST_ACTIVATIONS = 1 << 30
# Names of recordings that do not depend on the preconditioner.
EVALUATION, NOISE, STEP = "evaluation", "noise", "step"
STALE = "the model does not compute any more what was recorded of it"


class Recorder(Engine):
    """An engine with a graph cache and staleness checks; subclasses decide how work is recorded.

    Args:
        objective: the objective whose work is run.
        capture: records a function.

    Attributes:
        objective: as given.
        graphs: cache of recordings.
        staleness: compares recordings with the model.
        settled_at: `staleness.times_stale` when squared gradients were last computed eagerly.
        basis_room: with the rows of this step's basis; None unless the engine computed it.
        open_search: the search launched in this step, which may have written to the parameters.
    """

    def __init__(self, objective: Objective, capture: Capture) -> None:
        self.objective = objective
        self.graphs = GraphCache(objective.network, capture)
        self.staleness = Staleness(objective.network, self.graphs)
        self.settled_at = 0
        self.basis_room: BasisRoom | None = None
        self.open_search: SearchObjective | None = None
        self._trusted: list[Batch] = []  # batches whose recordings were assumed to be fresh
        self._was_repeatable = False  # `repeatable`, before `verify` reset it

    @property
    def possible(self) -> bool:
        """Whether the parameters are small enough for recordings to pay."""
        parameters = self.objective.parameters
        return parameters.numel * parameters.tensors[0].element_size() <= LARGEST_MODEL

    def fits(self, batch: Batch, *, times: int = 1) -> bool:
        """Whether the activations of a forward and backward pass are small enough to be recorded.

        Args:
            batch: the samples of the pass.
            times: number of such passes that run in parallel.
        """
        size = times * batch.size
        activations = size * self.objective.findings.bytes_per_sample
        return size <= self.objective.micro_batch and activations <= LARGEST_ACTIVATIONS

    def are_fresh(self, batch: Batch, losses: Tensor | None = None) -> bool:
        """Whether the recordings compute what the model computes; stale ones are dropped.

        In a repeatable step the recordings are assumed to be fresh, and `verify` checks them.

        Args:
            batch: its first samples are compared.
            losses: see `Staleness.compare`.

        Raises:
            StaleError: `verify` has run, its checks were inconclusive, and this one failed.
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
        for batch in trusted:  # compares nothing unless the earlier checks were inconclusive
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
                self.basis_room, search, self.open_search = None, self.open_search, None
                if search is not None:  # its step was not taken
                    search.restore()
                    self.finish()

    def finish(self) -> None:
        """Wait for all launched kernels."""

    def clear(self) -> None:
        self.graphs.clear()
        self.staleness.clear()

    def change_basis(self) -> None:
        pulses = [name for name in self.graphs.names if name.startswith(PULSE)]
        self.graphs.release(but=(EVALUATION, NOISE, STEP, *pulses))
