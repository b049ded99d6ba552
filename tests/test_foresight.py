"""The points that a GPU goes on with are those that BFGS chooses."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from krylov_descent import KSD, cuda_graphs
from krylov_descent.bfgs import BFGSResult, Trying, Vector, minimize_bfgs
from krylov_descent.exchanges import Ahead

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")

Function = Callable[[Vector], tuple[float, Vector]]
"""From coefficients c to the value and Vᵀ∇f."""


def quartic(size: int, scale: float = 1.0) -> Function:
    """A convex function, of which most trials are accepted if its scale is 1."""
    root = np.random.default_rng(size).standard_normal((size, size))
    matrix = root @ root.T / size + 0.1 * np.eye(size)
    linear = np.linspace(-1, 2, size)

    def at(c: Vector) -> tuple[float, Vector]:
        value = 0.5 * c @ matrix @ c - linear @ c + 0.01 * (c**4).sum()
        return scale * float(value), scale * (matrix @ c - linear + 0.04 * c**3)

    return at


def valley(c: Vector) -> tuple[float, Vector]:
    """Rosenbrock's, which steps leave again and again, too far or too short."""
    across, along = c[1:] - c[:-1] ** 2 - 0.2, 1 - c[:-1]
    gradient = np.zeros_like(c)
    gradient[1:] = 20 * across
    gradient[:-1] -= 40 * c[:-1] * across + 2 * along
    return float(10 * across @ across + along @ along), gradient


def waves(seed: int) -> Function:
    """Of any height and length around a bowl, of any scale."""
    generator = np.random.default_rng(seed)
    centre, phase = generator.standard_normal((2, 3))
    frequency = 10 ** generator.uniform(0, 1, 3)
    height, scale = 10 ** generator.uniform([-2, -4], [1, 3])

    def at(c: Vector) -> tuple[float, Vector]:
        inner, wave = c - centre, frequency * c + phase
        value = 0.5 * inner @ inner + height * np.sin(wave).sum()
        return scale * float(value), scale * (inner + height * frequency * np.cos(wave))

    return at


def above(function: Function, constant: float) -> Function:
    """With values that are larger by so much."""
    return lambda c: (constant + function(c)[0], function(c)[1])


def trembling(function: Function, noise: float) -> Function:
    """With values that are wrong by about so much."""

    def at(c: Vector) -> tuple[float, Vector]:
        value, gradient = function(c)
        return value + noise * math.sqrt(2) * math.sin(1e9 * float(c.sum())), gradient

    return at


def fenced(function: Function, value: float, gradient: float) -> Function:
    """With this value and gradient outside of a ball."""

    def at(c: Vector) -> tuple[float, Vector]:
        return function(c) if c @ c < 100 else (value, np.full_like(c, gradient))

    return at


@dataclass
class Watched:
    """A function of BFGS's coordinates, and the points that the GPU finds beside the search.

    The GPU is told of the first trial, and once more after each point that was not the next one.

    Attributes:
        function: in c = Mᵀa; its gradient is rounded to float32, as a GPU has it.
        rank: of M.
        rows: of the basis, of which those behind the rank are not there.
        missed: how many points were not foreseen.
    """

    function: Function
    rank: int
    rows: int
    missed: int = 0
    trials: list[Trying] = field(default_factory=list)

    def __post_init__(self) -> None:
        from krylov_descent.tensor_cores.foresight import Foresight

        mixing = np.random.default_rng(self.rank).standard_normal((self.rank, self.rank))
        self.to_coordinates = np.eye(self.rank) + 0.3 * mixing / np.sqrt(self.rank)
        self.foresight = Foresight(self.rows, CUDA)

    def at(self, c: Vector) -> tuple[float, Vector]:
        value, gradient = self.function(c)
        return value, gradient.astype(np.float32).astype(np.float64)

    def __call__(self, a: Vector) -> tuple[float, Vector]:
        c, number = self.to_coordinates.T @ a, len(self.trials) - 1
        guess = self.foresight.next_point(number - 1)[: self.rank]
        was_foreseen = number > 0 and np.abs(guess - c).max() < 1e-9 * np.abs(c).max()
        if not was_foreseen:
            self.missed += number > 0
            self.foresight.send(number, c, Ahead(self.trials[-1], self.to_coordinates))
        value, projected = self.at(c)
        self.evaluate(number, value, projected)
        return value, self.to_coordinates @ projected

    def evaluate(self, number: int, value: float, projected: Vector) -> None:
        """As a recording does; and what comes of it is all there."""
        padded = torch.zeros(self.rows, device=CUDA)
        padded[: self.rank] = torch.from_numpy(projected)
        self.foresight.bring(torch.tensor(value, dtype=torch.float64, device=CUDA), padded)
        next_point = self.foresight.coefficients().cpu().numpy()  # which waits for all of it
        assert np.isfinite(next_point).all()
        assert np.array_equal(self.foresight.next_point(number).astype(np.float32), next_point)
        found, back = np.split(self.foresight.numbers(number).numpy(), [1])
        assert np.array_equal(found, [value], equal_nan=True)
        assert np.array_equal(back[: self.rank], projected, equal_nan=True)

    def searched(self, noise: float = 0.0) -> BFGSResult:
        value, projected = self.at(np.zeros(self.rank))
        return minimize_bfgs(
            self,
            np.zeros(self.rank),
            initial=(value, self.to_coordinates @ projected),
            max_iterations=20,
            noise=noise,
            foresee=self.trials.append,
        )


@pytest.mark.parametrize(("rows", "rank"), [(5, 5), (21, 21), (32, 30), (43, 42), (64, 64)])
def test_points_follow_each_other_without_the_host(rows: int, rank: int) -> None:
    watched = Watched(quartic(rank), rank, rows)
    best = watched.searched()
    assert best.evaluations > 16
    assert watched.missed == 0


STEEP = quartic(20, scale=1e3)
SEARCHES = {
    "too far": (STEEP, 0.0),
    "too short": (quartic(20, scale=1e-9), 0.0),
    "a valley": (valley, 0.0),
    "a valley in noise": (trembling(valley, 0.1), 0.1),
    "too far in noise": (trembling(STEEP, 30.0), 30.0),
    "lost in a constant": (above(STEEP, 1e16), 0.0),
    "not a number": (fenced(STEEP, math.nan, math.nan), 0.0),
    "infinite": (fenced(STEEP, math.inf, math.inf), 0.0),
    "wild": (fenced(STEEP, -1.0, 1e9), 0.0),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_trial_that_is_rejected_is_followed_by_the_point_that_was_foreseen(name: str) -> None:
    function, noise = SEARCHES[name]
    watched = Watched(function, rank=20, rows=21)
    best = watched.searched(noise)
    assert best.evaluations - best.iterations >= 4
    assert watched.missed == 0


def test_whatever_the_function_is_like_the_points_were_foreseen() -> None:
    rejected = 0
    for seed in range(20):
        watched = Watched(waves(seed), rank=3, rows=3)
        best = watched.searched()
        rejected += best.evaluations - best.iterations
        assert watched.missed == 0
    assert rejected >= 80


def test_there_is_a_point_to_go_on_with_whatever_comes() -> None:
    watched = Watched(quartic(20), rank=20, rows=20)
    watched.searched()
    last = replace(watched.trials[-1], inverse_hessian=1e308 * np.eye(20))
    watched.foresight.send(0, last.point, Ahead(last, watched.to_coordinates))
    watched.evaluate(0, last.value, np.zeros(20))


def test_steps_with_foresight_are_those_without(monkeypatch: pytest.MonkeyPatch) -> None:
    from krylov_descent.tensor_cores import foresight

    images = torch.rand(1000, 400, generator=torch.Generator().manual_seed(2)).cuda()
    replay, steps = cuda_graphs.Recording.__call__, []
    for most in (64, 0):
        monkeypatch.setattr(foresight, "MOST", most)
        torch.manual_seed(1)
        layers = [nn.Linear(400, 200), nn.Sigmoid(), nn.Linear(200, 30), nn.Sigmoid()]
        net = nn.Sequential(*layers, nn.Linear(30, 200), nn.Sigmoid(), nn.Linear(200, 400)).cuda()
        optimizer = KSD(net, nn.BCEWithLogitsLoss(), dimension=8)
        optimizer.step((images, images))
        launches = []

        def noted(recording: cuda_graphs.Recording) -> object:
            launches.append(recording)  # noqa: B023
            return replay(recording)

        monkeypatch.setattr(cuda_graphs.Recording, "__call__", noted)
        found = [optimizer.step((images, images)) for _ in range(6)]
        monkeypatch.setattr(cuda_graphs.Recording, "__call__", replay)
        evaluation = optimizer.objective.recordings._held["evaluation"][1]
        asked = sum(step.evaluations for step in found)
        steps.append(found)
        # One more at the end of each search, and hardly any that was not asked for otherwise.
        assert evaluation.result.foresees == (most == 64)
        assert launches.count(evaluation) <= asked + (2 * len(found) if most else 0)
        assert launches.count(evaluation) >= asked
    for with_foresight, without in zip(*steps, strict=True):
        assert with_foresight.evaluations == without.evaluations
        assert with_foresight.loss_after == pytest.approx(without.loss_after, rel=1e-5)
