"""What a problem of this kind is: an equation with its conditions, a net, and the solution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from krylov_descent.objective.term import Term

TEST_POINTS = 9000
# Rows and columns.
PICTURE = (101, 128)
# Points [m, d] to the solution [m, 1].
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Equation:
    """A problem.

    Attributes:
        title: what tables call it.
        formula: the equation in plain text.
        source: where equation, points and net were published.
        widths: of the net: inputs, hidden layers, outputs.
        make_terms: the terms with their points; the same at each call.
        solution: exact, or by another method.
        box: the lowest and the highest of each coordinate.
        axes: the names of the first and the last coordinate.
        make_test_points: the points [m, d] at which nets are compared with the solution; random
            ones if None.
    """

    title: str
    formula: str
    source: str
    widths: tuple[int, ...]
    make_terms: Callable[[], dict[str, Term]]
    solution: Function
    box: tuple[Sequence[float], Sequence[float]]
    axes: tuple[str, str] = ("x", "t")
    make_test_points: Callable[[], Tensor] | None = None

    def make_net(self, seed: int) -> nn.Sequential:
        """A tanh net in float64, as Glorot and Bengio begin it."""
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in pairwise(self.widths):
            layer = nn.Linear(before, after, dtype=torch.float64)
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.Tanh()]
        return nn.Sequential(*layers[:-1])

    def test_points(self) -> Tensor:
        """The points [m, d] at which nets are compared with the solution; no term has them."""
        if self.make_test_points is not None:
            return self.make_test_points()
        return drawn(TEST_POINTS, *self.box, seed=2)

    def plane(self) -> Tensor:
        """The points [PICTURE[0]·PICTURE[1], d] of a picture, row by row.

        The first coordinate grows within a row, the last one from row to row, and all others are in
        the middle. A solution on a grid has them.
        """
        low, high = (torch.tensor(corner, dtype=torch.float64) for corner in self.box)
        rows, columns = PICTURE
        up = torch.linspace(0, 1, rows, dtype=torch.float64)
        right = torch.arange(columns, dtype=torch.float64) / columns
        parts = torch.full((rows, columns, len(low)), 0.5, dtype=torch.float64)
        parts[:, :, 0], parts[:, :, -1] = right, up[:, None]
        return (low + parts * (high - low)).flatten(0, 1)

    def error(self, net: Function) -> float:
        """‖u - solution‖ / ‖solution‖ at the test points."""
        points = self.test_points()
        truth = self.solution(points)
        with torch.no_grad():
            return float((net(points) - truth).norm() / truth.norm())


def on_device(terms: dict[str, Term], device: torch.device | str) -> dict[str, Term]:
    """The terms, which have no data, with their points on a device; they are changed in place."""
    for term in terms.values():
        points = term.points
        one = isinstance(points, Tensor)
        term.points = points.to(device) if one else tuple(part.to(device) for part in points)
    return terms


def drawn(count: int, low: Sequence[float], high: Sequence[float], seed: int = 0) -> Tensor:
    """Random points [count, d] in a box, the same at each call."""
    generator = torch.Generator().manual_seed(1000 * count + seed)
    unit = torch.rand(count, len(low), generator=generator, dtype=torch.float64)
    start = torch.tensor(low, dtype=torch.float64)
    return start + unit * (torch.tensor(high, dtype=torch.float64) - start)


def between(low: Sequence[float], high: Sequence[float], count: int) -> Tensor:
    """Points [count, d] on the diagonal of a box, at equal distances."""
    part = torch.linspace(0, 1, count, dtype=torch.float64)[:, None]
    start = torch.tensor(low, dtype=torch.float64)
    return start + part * (torch.tensor(high, dtype=torch.float64) - start)


def on_sides(
    count: int, low: Sequence[float], high: Sequence[float], axes: Sequence[int]
) -> Tensor:
    """Random points on those sides of a box where a coordinate of `axes` is extreme."""
    points = drawn(count, low, high, seed=1)
    for i, point in enumerate(points):
        axis = axes[i // 2 % len(axes)]
        point[axis] = (low, high)[i % 2][axis]
    return points


def at(points: Tensor, axis: int, value: float) -> Tensor:
    """A copy of points with one coordinate replaced."""
    found = points.clone()
    found[:, axis] = value
    return found


def slopes(u: Tensor, points: Tensor) -> Tensor:
    """∂u/∂x at each point [m, d], in the autograd graph; u [m, 1] depends on its own point."""
    (found,) = torch.autograd.grad(
        u.sum(), points, create_graph=True, allow_unused=True, materialize_grads=True
    )
    return found


def second(first: Tensor, points: Tensor, axes: Sequence[int]) -> Tensor:
    """Σ ∂²u/∂x² over some axes [m], from the first derivatives [m, d]."""
    rows = [slopes(first[:, axis], points)[:, axis] for axis in axes]
    return torch.stack(rows).sum(0)


def matches(solution: Function) -> Callable[[Function, Tensor], Tensor]:
    """The residual of a condition: u shall be the solution."""
    return lambda net, points: net(points) - solution(points.detach())
