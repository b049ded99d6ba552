"""The point that a GPU goes on with is the one that BFGS chooses next."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from krylov_descent import KSD, cuda_graphs
from krylov_descent.bfgs import Trying, Vector, minimize_bfgs
from krylov_descent.exchanges import Ahead

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


class Quartic:
    """A convex function of c = Mᵀa, with a gradient in single precision, as a GPU has it."""

    def __init__(self, size: int) -> None:
        generator = np.random.default_rng(size)
        root, mixing = generator.standard_normal((2, size, size))
        self.matrix = root @ root.T / size + 0.1 * np.eye(size)
        self.to_coordinates = np.eye(size) + 0.3 * mixing / np.sqrt(size)
        self.linear = np.linspace(-1, 2, size)

    def at(self, c: Vector) -> tuple[float, Vector]:
        value = 0.5 * c @ self.matrix @ c - self.linear @ c + 0.01 * (c**4).sum()
        gradient = self.matrix @ c - self.linear + 0.04 * c**3
        return float(value), gradient.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize(("rows", "rank"), [(5, 5), (21, 21), (32, 30), (43, 42), (64, 64)])
def test_an_accepted_trial_is_followed_by_the_point_that_was_foreseen(rows: int, rank: int) -> None:
    from krylov_descent.tensor_cores.foresight import Foresight

    quartic, foresight = Quartic(rank), Foresight(rows, CUDA)
    trials, asked, foreseen = list[Trying](), list[Vector](), list[Vector]()

    def function(a: Vector) -> tuple[float, Vector]:
        c = quartic.to_coordinates.T @ a
        value, projected = quartic.at(c)
        number = len(asked)
        foresight.send(number, c, Ahead(trials[-1], quartic.to_coordinates))
        padded = torch.zeros(rows, device=CUDA)
        padded[:rank] = torch.from_numpy(projected)
        foresight.bring(torch.tensor(value, dtype=torch.float64, device=CUDA), padded)
        next_point = foresight.coefficients()[:rank].cpu().numpy()  # which waits for all of it
        found, back = np.split(foresight.numbers(number).numpy(), [1])
        guess = foresight.next_point(number)
        assert found[0] == value
        assert np.array_equal(back[:rank], projected)
        assert np.array_equal(guess[:rank].astype(np.float32), next_point)
        asked.append(c)
        foreseen.append(guess[:rank].copy())
        return value, quartic.to_coordinates @ projected

    value, projected = quartic.at(np.zeros(rank))
    best = minimize_bfgs(
        function,
        np.zeros(rank),
        initial=(value, quartic.to_coordinates @ projected),
        max_iterations=12,
        foresee=trials.append,
    )
    assert best.iterations == 12
    right = [
        np.abs(guess - c).max() < 1e-9 * np.abs(c).max()
        for guess, c in zip(foreseen[:-1], asked[1:], strict=True)
    ]
    # What is not right was a trial that the line search did not accept.
    assert right.count(False) == best.evaluations - best.iterations


def test_points_follow_each_other_without_the_host() -> None:
    from krylov_descent.tensor_cores.foresight import Foresight

    rows, trials = 12, list[Trying]()
    quartic, foresight = Quartic(rows), Foresight(rows, CUDA)

    def function(a: Vector) -> tuple[float, Vector]:
        value, projected = quartic.at(quartic.to_coordinates.T @ a)
        return value, quartic.to_coordinates @ projected

    found = minimize_bfgs(function, np.zeros(rows), max_iterations=3, foresee=trials.append)
    assert found.evaluations == 4  # so that each trial was accepted
    first = replace(trials[0], inverse_hessian=np.eye(rows))  # which was overwritten
    foresight.send(
        3, -quartic.to_coordinates.T @ first.gradient, Ahead(first, quartic.to_coordinates)
    )
    for _ in trials:
        value, projected = quartic.at(foresight.coefficients().cpu().double().numpy())
        numbers = torch.from_numpy(projected).float().to(CUDA)
        foresight.bring(torch.tensor(value, dtype=torch.float64, device=CUDA), numbers)
    last = quartic.to_coordinates.T @ found.point
    # The third point was foreseen at the second, evaluation 4.
    assert np.allclose(foresight.next_point(4), last, rtol=1e-5, atol=1e-5)


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
        # One more at the end of each search, and after each trial that is not accepted; no others.
        assert evaluation.result.foresees == (most == 64)
        more = sum(step.evaluations - step.iterations for step in found) if most else 0
        assert launches.count(evaluation) <= asked + more
        assert launches.count(evaluation) >= asked
    for with_foresight, without in zip(*steps, strict=True):
        assert with_foresight.evaluations == without.evaluations
        assert with_foresight.loss_after == pytest.approx(without.loss_after, rel=1e-5)
