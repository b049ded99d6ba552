"""How the work of a step is run.

The rooms of the method describe the pieces of a step as `Work`: the gradient on A, a linearisation
on B, the Krylov basis, the objective in the subspace. An engine runs them and hands out futures
(`Launched`). The engine here runs each piece when its result is asked for. Another engine may
launch work before that, or run it in another way; what a step finds and reports is the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Work(Protocol[Result_co]):
    """A piece of a step. An engine that knows nothing better calls `run`."""

    def run(self) -> Result_co:
        """Do the work, here and now."""


class Launched(Generic[Result]):
    """The future of a piece of work: the result is computed, or waited for, when it is read.

    Args:
        read: gives the result. It is called once, by the first reader.
    """

    def __init__(self, read: Callable[[], Result]) -> None:
        self._read: Callable[[], Result] | None = read
        self._result: Result

    @classmethod
    def done(cls, result: Result) -> "Launched[Result]":
        """The future of a result that is known."""
        return cls(lambda: result)

    def result(self) -> Result:
        """The result. Raises what the work raised; a later call tries again."""
        if self._read is not None:
            self._result = self._read()
            self._read = None
        return self._result


class StaleError(Exception):
    """An engine ran work in the way the model was at an earlier step, and the model has changed.

    Nothing of the step may be kept. The optimiser forgets what the engine knows of the model
    (`Engine.clear`) and makes the step again.
    """


class Engine:
    """Runs each piece of work when its result is asked for.

    Attributes:
        in_step: whether a step is under way.
        repeatable: whether the step under way can be made again, and so may end with `StaleError`.
    """

    in_step = False
    repeatable = False

    def launch(self, work: Work[Result]) -> Launched[Result]:
        """The future of a piece of work."""
        return Launched(work.run)

    @contextmanager
    def step(self) -> Iterator[None]:
        """For the time of a step. What the model computes does not change within it."""
        self.in_step, self.repeatable = True, False
        try:
            yield
        finally:
            self.in_step = self.repeatable = False

    def verify(self) -> None:
        """Called before anything that was found is acted on.

        Raises:
            StaleError: what was found is not what the model computes now.
        """

    def clear(self) -> None:
        """Forget all that is known of the model: it has changed."""

    def change_preconditioner(self) -> None:
        """Forget what depends on the preconditioner: another one follows."""
