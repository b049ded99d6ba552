"""A minimiser asks for points and is told the value and gradient there. It calls no function.

So the caller decides how to evaluate the function: at once, over several processes, or by a launch
on a GPU as soon as the next point is known. `minimize` is the simplest caller.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

Point = TypeVar("Point")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Minimizer(Protocol[Point, Result_co]):
    """A minimisation in progress."""

    @property
    def point(self) -> Point:
        """The point to evaluate; after the end, the point of the result."""

    @property
    def result(self) -> Result_co | None:
        """What was found; None until the end."""

    def tell(self, value: float, gradient: Point, /) -> None:
        """Take the value and gradient at `point`, and continue to the next point or the result.

        Raises:
            RuntimeError: there is a result already.
        """


def minimize(
    method: Minimizer[Point, Result], function: Callable[[Point], tuple[float, Point]]
) -> Result:
    """Evaluate a function wherever a minimiser asks for it, until there is a result.

    Args:
        method: the minimiser; it may be in progress already.
        function: a point → the value and gradient there. Its exceptions are passed on, and `method`
            then still asks for the same point.
    """
    while (result := method.result) is None:
        method.tell(*function(method.point))
    return result
