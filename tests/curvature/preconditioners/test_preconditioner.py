"""D⁻¹ applied to a vector."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.curvature.preconditioners.preconditioner import (
    FisherDiagonal,
    Identity,
    Preconditioner,
)
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.ksd.preconditioner_schedule import make_preconditioner
from tests import dense
from tests.problems import make


@pytest.mark.parametrize("epsilon", [1e-4, 0.3])
def test_the_diagonal_is_floored_relative_to_its_largest_entry(epsilon: float) -> None:
    problem = make("mlp", "cross-entropy")
    exact = dense.squares(problem)
    preconditioner = FisherDiagonal(epsilon)
    found = preconditioner.update(Objective(problem.model, problem.loss), problem.data)
    expected = (exact / exact.max()).clamp(min=epsilon)
    assert (expected == epsilon).any() or epsilon < 0.1  # the larger floor is felt
    torch.testing.assert_close(preconditioner.diagonal, expected)

    assert found.value == pytest.approx(dense.value(problem))
    torch.testing.assert_close(found.gradient, dense.gradient(problem))
    vector = torch.randn_like(exact)
    before = vector.clone()
    torch.testing.assert_close(preconditioner.solve(vector), before / expected)
    assert torch.equal(vector, before)


def test_weight_decay_of_each_group_is_added_before_the_floor() -> None:
    problem = make("mlp", "mse")
    first, last = (list(problem.model[i].parameters()) for i in (0, 2))  # type: ignore[index]
    groups = [{"params": first, "weight_decay": 50.0}, {"params": last, "weight_decay": 0.01}]
    preconditioner = FisherDiagonal(1e-3)
    preconditioner.update(Objective(problem.model, problem.loss, params=groups), problem.data)
    split = sum(p.numel() for p in first)
    decayed = dense.squares(problem)
    decayed[:split] += 50.0
    decayed[split:] += 0.01
    assert float(decayed.min()) < 1e-3 * float(decayed.max())  # the floor comes after λ
    relative = decayed / decayed.max()
    torch.testing.assert_close(preconditioner.diagonal, relative.clamp(min=1e-3))


def test_a_gradient_of_zero_gives_the_identity() -> None:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        [p.zero_() for p in model.parameters()]
    preconditioner = FisherDiagonal()
    found = preconditioner.update(
        Objective(model, nn.MSELoss()), (torch.randn(3, 2), torch.zeros(3, 1))
    )
    assert not found.gradient.any()
    assert torch.equal(preconditioner.diagonal, torch.ones(3))


def test_the_diagonal_follows_the_parameters() -> None:
    problem = make("mlp", "mse")
    objective, preconditioner = Objective(problem.model, problem.loss), FisherDiagonal(1e-12)
    preconditioner.update(objective, problem.data)
    objective.parameters.assign(objective.parameters.copy() * 2)
    preconditioner.update(objective, problem.data)
    squares = dense.squares(problem)
    torch.testing.assert_close(preconditioner.diagonal, squares / squares.max())


def test_the_data_may_be_walked_over_only_once() -> None:
    problem = make("mlp", "mse")
    inputs, targets = problem.data
    for preconditioner in (FisherDiagonal(), Identity()):
        stream = ((inputs[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4))
        found = preconditioner.update(Objective(problem.model, problem.loss), stream)
        assert found.samples == 5
        torch.testing.assert_close(found.gradient, dense.gradient(problem))


def test_the_identity_copies() -> None:
    problem = make("mlp", "mse")
    preconditioner = Identity()
    found = preconditioner.update(Objective(problem.model, problem.loss), problem.data)
    torch.testing.assert_close(found.gradient, dense.gradient(problem))
    assert found.squares.numel() == 0
    vector = torch.randn(4)
    solved = preconditioner.solve(vector)
    assert torch.equal(solved, vector)
    assert solved.data_ptr() != vector.data_ptr()


class Halving:
    """A preconditioner of the user's own."""

    def update(self, objective: Objective, data: Any) -> Evaluation:
        return objective.value_and_gradient(data)

    def solve(self, vector: Tensor) -> Tensor:
        return vector / 2

    def multiply(self, vector: Tensor) -> Tensor:
        return 2 * vector


def test_preconditioners_by_name_and_by_protocol() -> None:
    assert isinstance(make_preconditioner("identity", 1e-4), Identity)
    diagonal = make_preconditioner("fisher-diagonal", 0.5)
    assert isinstance(diagonal, FisherDiagonal)
    problem = make("mlp", "mse")
    diagonal.update(Objective(problem.model, problem.loss), problem.data)
    assert float(diagonal.diagonal.min()) == pytest.approx(0.5 * float(diagonal.diagonal.max()))
    own = Halving()
    assert make_preconditioner(own, 1e-4) is own
    assert isinstance(own, Preconditioner)


@pytest.mark.parametrize(
    "given", ["diagonal", None, 3, torch.zeros(2), nn.Linear(1, 1), FisherDiagonal]
)
def test_other_preconditioners_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"`preconditioner` must be 'auto'.*found"):
        make_preconditioner(given, 1e-4)
