"""A minimiser asks for points and is told the value and the gradient there; it calls nothing.

So whoever evaluates the function decides how: at once, over several processes, or by a launch on a
GPU, which can begin as soon as the next point is known. `minimize` is the plain way to do it.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

Point = TypeVar("Point")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Minimizer(Protocol[Point, Result_co]):
    """A minimisation under way."""

    @property
    def point(self) -> Point:
        """The point asked for, until `tell` is called; after the end, the point of the result."""

    @property
    def result(self) -> Result_co | None:
        """What was found; None while points are asked for."""

    def tell(self, value: float, gradient: Point, /) -> None:
        """Take value and gradient at `point` and go on to the next point, or to the result.

        Raises:
            RuntimeError: there is a result already.
        """


def minimize(
    method: Minimizer[Point, Result], function: Callable[[Point], tuple[float, Point]]
) -> Result:
    """Evaluate a function wherever a minimiser asks for it, until there is a result.

    Args:
        method: the minimiser; it may be under way already.
        function: from a point to the value and the gradient there. What it raises is passed on,
            and `method` still asks for the same point.
    """
    while (result := method.result) is None:
        method.tell(*function(method.point))
    return result
