"""The interface between the method and the engine that runs the work of a step.

The method describes the pieces of a step as `Work`: the gradient on A, a linearisation on B, the
Krylov basis, the objective in the subspace. An engine runs each piece and returns a future
(`Launched`). The eager engine in this file runs a piece when its result is first read. Another
engine may launch a piece earlier or run it differently. The results and the counters that a step
reports do not depend on the engine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Work(Protocol[Result_co]):
    """A piece of a step. An engine without a faster way for this type of work calls `run`."""

    def run(self) -> Result_co:
        """Compute the result now."""


class Launched(Generic[Result]):
    """The future of a piece of work, computed or waited for when the result is first read.

    Args:
        read: returns the result. It is not called again once it has returned.
    """

    def __init__(self, read: Callable[[], Result]) -> None:
        self._read: Callable[[], Result] | None = read
        self._result: Result

    @classmethod
    def done(cls, result: Result) -> "Launched[Result]":
        """A future whose result is already known."""
        return cls(lambda: result)

    def result(self) -> Result:
        """The result. An error of the work is raised here, and a later call tries again."""
        if self._read is not None:
            self._result = self._read()
            self._read = None
        return self._result


class StaleError(Exception):
    """An engine replayed work that it had prepared in an earlier step, and the model has changed.

    No result of the step may be kept. The optimiser clears the engine's caches (`Engine.clear`) and
    repeats the step.
    """


class Engine:
    """The eager engine: it runs a piece of work when its result is first read.

    Attributes:
        in_step: whether a step is under way.
        repeatable: whether the current step can be repeated, and so may raise `StaleError`.
    """

    in_step = False
    repeatable = False

    def launch(self, work: Work[Result]) -> Launched[Result]:
        """Return the future of a piece of work."""
        return Launched(work.run)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager around a step, within which the model's computation does not change."""
        self.in_step, self.repeatable = True, False
        try:
            yield
        finally:
            self.in_step = self.repeatable = False

    def verify(self) -> None:
        """Check the results so far, before the optimiser acts on them.

        Raises:
            StaleError: a result is not what the model computes now.
        """

    def clear(self) -> None:
        """Clear all caches, because the model has changed."""

    def change_basis(self) -> None:
        """Clear the caches for bases, because another preconditioner or kind of basis follows."""
