"""When a GPU goes on with a search by itself, and what that costs where the search turns elsewhere.

Here the GPU is a list of the points that it will find. `test_foresight` has the kernel.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from krylov_descent.bfgs import Trying, Vector
from krylov_descent.exchanges import Ahead
from krylov_descent.line_search import Bracket, Point
from krylov_descent.objective import Objective
from krylov_descent.on_the_way import OnTheWay
from krylov_descent.recorded_objective import RecordedObjective


class Walk:
    """A recording of c², and its exchange; behind each evaluation one of these points is found."""

    foresees = True

    def __init__(self, *found: float) -> None:
        self.result, self.found = self, list(found)
        self.sent, self.launched = list[float](), list[float]()
        self.point, self.lines = 0.0, torch.zeros(4, 3, dtype=torch.float64)

    def __call__(self) -> None:
        c, self.point = self.point, self.found.pop(0)
        self.lines[len(self.launched) % len(self.lines)] = torch.tensor([c * c, 2 * c, self.point])
        self.launched.append(c)

    def send(self, number: int, coefficients: Vector, ahead: Ahead | None) -> None:
        assert number == len(self.launched)
        self.point = float(coefficients.sum())
        self.sent.append(self.point)

    def numbers(self, number: int) -> Tensor:
        return self.lines[number % len(self.lines), :2]

    def next_point(self, number: int) -> Vector:
        found: Vector = self.lines[number % len(self.lines), 2:].numpy()
        return found


def walked(walk: Any, points: list[float], ahead: Ahead | None) -> None:
    """Ask for these points."""
    objective = Objective(nn.Linear(1, 1), nn.MSELoss())
    normaliser = OnTheWay(torch.ones(()))
    function = RecordedObjective(objective, walk, None, None, samples=1, normaliser=normaliser)
    for c in points:
        value, projected = function(np.array([c]), ahead)
        assert [value, *projected] == pytest.approx([c * c, 2 * c])


@pytest.fixture
def ahead() -> Ahead:
    """Of a trial, whichever."""
    one, start = np.ones(1), Point(0.0, 0.0, -1.0)
    bracket = Bracket(start, start, None)
    return Ahead(Trying(one, 0.0, one, -one, -1.0, 1.0, bracket, np.eye(1), True, 0.0), np.eye(1))


def test_points_that_were_foreseen_are_not_sent(ahead: Ahead) -> None:
    walk = Walk(-1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
    walked(walk, [1.0, 2.0, 3.0, 4.0], ahead)
    assert walk.sent == [0.0, 1.0]
    assert walk.launched == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_behind_a_trial_that_may_be_the_last_nothing_is_launched(ahead: Ahead) -> None:
    walk = Walk(-1.0, 2.0, 3.0, 4.0)
    last = replace(ahead, trying=replace(ahead.trying, noise=0.2))  # of half a slope of 1
    walked(walk, [1.0, 2.0, 3.0], last)
    assert walk.sent == [0.0, 1.0]  # the others are there all the same
    assert walk.launched == [0.0, 1.0, 2.0, 3.0]
    walk = Walk(-1.0, 2.0, 3.0, 4.0, 5.0)
    first = replace(ahead, trying=replace(ahead.trying, noise=0.1))
    walked(walk, [1.0, 2.0, 3.0], first)
    assert walk.launched == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_after_a_point_that_was_not_foreseen_one_has_to_be_right(ahead: Ahead) -> None:
    # -2 is found where the search asks for 3, and -5 where it asks for 5.
    walk = Walk(-1.0, 2.0, -2.0, -3.0, -5.0, 6.0, 7.0, 8.0)
    walked(walk, [1.0, 2.0, 3.0, 5.0, 6.0], ahead)
    assert walk.sent == [0.0, 1.0, 3.0, 5.0]
    assert walk.launched == [0.0, 1.0, 2.0, -2.0, 3.0, 5.0, 6.0, 7.0]


def test_nothing_is_foreseen_of_what_is_not_known() -> None:
    walk = Walk(1.0, 2.0, 3.0)
    walked(walk, [1.0, 2.0], None)
    assert walk.sent == walk.launched == [0.0, 1.0, 2.0]
