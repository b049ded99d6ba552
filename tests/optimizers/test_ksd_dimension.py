"""How many directions a step has, and how long it searches, where nothing was given."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from torch import nn

from krylov_descent import KSD, Status
from krylov_descent.algorithms.basis_storage import Alone, StoredBasis
from krylov_descent.algorithms.krylov import Found
from krylov_descent.algorithms.subspace import Subspace
from krylov_descent.optimizers.ksd.dimension import DIRECTIONS, best_number, learn, provided_for
from krylov_descent.optimizers.ksd.work import Work
from tests.optimizers.nets import classes, net
from tests.problems import make


def test_what_the_model_keeps_is_chosen_by_the_ratio() -> None:
    """√k for 10 + k is largest at 10; what all bring is what the model promises."""
    k = np.arange(1, 41, dtype=float)
    assert best_number(np.sqrt(k), math.sqrt(40), 10 + k) == 10
    assert best_number(np.sqrt(k), 2 * math.sqrt(40), 10 + k) == 10  # more than it promises


def test_large_promises_that_were_not_kept_count_little() -> None:
    """With p = k and a limit L, pL/(p + L) over 10 + k is largest at k = √(10 L)."""
    k = np.arange(1, 41, dtype=float)
    assert best_number(k, 40.0, 10 + k) == 40
    for limit in (0.9, 2.5, 10.0):
        decrease = 40 * limit / (40 + limit)
        assert best_number(k, decrease, 10 + k) == round(math.sqrt(10 * limit))


def test_work_is_that_of_the_passes_and_the_rows() -> None:
    work = Work(KSD(nn.Linear(4, 1), nn.MSELoss()).objective)
    assert work.gradient(100) - work.gradient(0) == 100
    assert work.basis(100, 1) == 1.25 * work.gradient(100)
    assert work.basis(100, 3) == 3 * work.basis(100, 1) + 3 * 3 * (1 + 2)
    assert work.evaluation(100, 5) == work.gradient(100) + 2 * 5 * 3


def test_room_for_more_directions_comes_in_few_sizes() -> None:
    sizes = sorted({provided_for(K) for K in range(1, 300)})
    assert sizes == [64, 96, 144, 216, 324]
    assert all(provided_for(K) >= K for K in range(1, 300))


def steps_of(count: int, **options: Any) -> tuple[KSD, list[Any]]:
    problem = make("mlp", "cross-entropy")
    optimizer = KSD(problem.model, problem.loss, **options)
    return optimizer, [optimizer.step(problem.data) for _ in range(count)]


def test_the_number_changes_and_the_result_says_why() -> None:
    optimizer, results = steps_of(6)
    numbers = [20]
    for result in results:
        assert result.status is Status.MOVED
        numbers.append(int(result.dimension_reason.split()[-1]))
        factor = 4 if "exact" in result.dimension_reason else 1.3
        assert 5 <= numbers[-1] <= factor * numbers[-2] + 1
    assert len(set(numbers)) > 2
    assert optimizer.param_groups[0]["directions"] == numbers[-1]
    assert optimizer.dimension == "auto"


def test_a_given_number_stays() -> None:
    optimizer, results = steps_of(3, dimension=4, previous_steps=1)
    assert [result.rank for result in results] == [4, 5, 5]
    assert not any(result.dimension_reason for result in results)
    assert optimizer.param_groups[0]["directions"] == 4


def test_a_search_of_a_given_length_ends_there() -> None:
    _, results = steps_of(2, bfgs_iterations=2)
    assert all(result.iterations <= 2 for result in results)
    _, results = steps_of(2)
    assert any("less than the step's average" in result.reason for result in results)


def test_a_resumed_run_has_the_same_numbers() -> None:
    optimizer, data = KSD(net(), nn.CrossEntropyLoss()), classes()
    for _ in range(3):
        optimizer.step(data)
    model = copy.deepcopy(optimizer.objective.network.eager)
    resumed = KSD(model, nn.CrossEntropyLoss())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        first, second = optimizer.step(data), resumed.step(data)
        assert (first.rank, first.evaluations) == (second.rank, second.evaluations)
        assert first.loss_after == second.loss_after
    # A number that is given replaces the one in a state.
    other = KSD(copy.deepcopy(model), nn.CrossEntropyLoss(), dimension=3, previous_steps=3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.step(data).rank <= 6


def space_of(rows: int) -> Subspace:
    """A space in which the model promises a decrease of 1, by the first direction alone."""
    curvature, gram = torch.eye(rows, dtype=torch.float64), torch.eye(rows)
    stored = StoredBasis.at(torch.zeros(rows, 40))
    return Subspace(stored, Alone(40), Found(list(range(rows)), curvature, gram, 2.0))


@pytest.mark.parametrize(
    ("decrease", "expected"),
    [(1.0, 40), (1.00005, 40), (0.999, 13), (0.98, 13), (0.86, 13), (1.04, 13), (0.8, 8), (1.1, 8)],
)
def test_the_number_grows_where_the_model_keeps_its_promise(decrease: float, expected: int) -> None:
    """Even if one direction would have done: 10 become 40 or 13, and otherwise 10 / 1.3."""
    group = {DIRECTIONS: 10}
    learn(group, space_of(10), decrease, list(range(1, 11)), comparable=True, most=1000)
    assert group[DIRECTIONS] == expected


@pytest.mark.parametrize(
    ("now", "decrease", "comparable", "expected"),
    [
        (8, 0.09, True, 10),
        (18, 0.09, True, 20),
        (20, 0.09, True, 15),
        (8, 0.11, True, 6),
        (8, 0.09, False, 6),
    ],
)
def test_a_promise_that_was_not_kept_at_all_brings_the_usual_number(
    now: int, decrease: float, comparable: bool, expected: int
) -> None:
    """Where the two can be compared: otherwise, and with 20 or more, it falls to now / 1.3."""
    group = {DIRECTIONS: now}
    work = list(range(1, now + 1))
    reason = learn(group, space_of(now), decrease, work, comparable=comparable, most=1000)
    assert group[DIRECTIONS] == expected
    assert ("far off" in reason) == (expected > now)


def test_a_plateau_does_not_take_the_directions_away() -> None:
    """On iris some steps keep less than a tenth of the promise."""
    inputs, labels = load_iris(return_X_y=True)
    x = torch.tensor((inputs - inputs.mean(0)) / inputs.std(0), dtype=torch.float32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 3))
    optimizer = KSD(model, nn.CrossEntropyLoss())
    grown = []
    for _ in range(20):
        before = optimizer.param_groups[0][DIRECTIONS]
        result = optimizer.step((x, torch.tensor(labels)))
        if "far off" in result.dimension_reason:
            grown.append((before, optimizer.param_groups[0][DIRECTIONS]))
    assert grown
    assert all(before < after <= 20 for before, after in grown)


@pytest.mark.parametrize("curvature", ["fisher", "hessian"])
def test_only_a_promise_of_gauss_newton_is_compared_with_the_decrease(curvature: Any) -> None:
    """That of a Fisher matrix is in other units, that of an indefinite Hessian has no bound."""
    _, results = steps_of(8, curvature=curvature)
    assert not any("far off" in result.dimension_reason for result in results)


def test_a_linear_model_is_solved_in_a_few_steps() -> None:
    """A condition of 1e12: 8 directions, then all 30."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(rows, 30, generator=generator).double() for rows in (100, 30))
    left, right = (torch.linalg.qr(matrix)[0] for matrix in drawn)
    inputs = left * torch.logspace(0, -6, 30, dtype=torch.float64) @ right.T
    targets = inputs @ torch.randn(30, 1, generator=generator).double()
    torch.manual_seed(0)
    model = nn.Linear(30, 1, bias=False, dtype=torch.float64)
    optimizer = KSD(model, nn.MSELoss())
    results = [optimizer.step((inputs, targets)) for _ in range(4)]
    assert [result.rank for result in results[:2]] == [8, 30]
    assert results[-1].loss_after < 1e-24 * results[0].loss


@pytest.mark.parametrize(("most", "expected"), [(1000, 39), (33, 33), (7, 20)])
def test_little_memory_bounds_the_number(most: int, expected: int) -> None:
    """It may grow to 39, but not beyond what fits in, which may be less than the first number."""
    group = {DIRECTIONS: 30}
    work = [1.0] * 29 + [0.1]  # the last direction makes all of them cheap
    reason = learn(group, space_of(30), 0.5, work, comparable=False, most=most)
    assert group[DIRECTIONS] == expected
    assert reason == f"the last directions were worth their products; the next step has {expected}"


@pytest.mark.parametrize("curvature", ["hessian", "fisher"])
def test_every_curvature_can_choose(curvature: Any) -> None:
    _, results = steps_of(4, curvature=curvature)
    assert all(result.dimension_reason for result in results if result.status is Status.MOVED)


def test_negative_curvature_chooses_a_number_too() -> None:
    """A recurrent net's Hessian is far from positive."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.cell(x)[0][:, -1])

    torch.manual_seed(0)
    inputs, targets = torch.randn(60, 10, 3), torch.randint(4, (60,))
    optimizer = KSD(Reader(), nn.CrossEntropyLoss(), curvature="hessian")
    results = [optimizer.step((inputs, targets)) for _ in range(6)]
    assert min(results[-1].ritz_values) < 0
    assert all("next step has" in result.dimension_reason for result in results)
    assert results[-1].loss < results[0].loss
