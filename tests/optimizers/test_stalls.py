"""No training stops for good before its end: kinks, noise, and what refused steps change."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn

from benchmarks.stall_sweep import train
from krylov_descent import KSD, Status, StepResult
from krylov_descent.integrations.perceptron import make_perceptron
from krylov_descent.optimizers.ksd import escalation
from krylov_descent.optimizers.result import SCALED_AWAY


@pytest.mark.parametrize(
    ("kind", "seed", "loss"),
    [
        ("classification, ReLU, N = 100, float64", 12, 0.5),
        ("classification, ReLU, N = 60, float32", 17, 0.4),
        ("regression, ReLU, N = 200, float32", 0, 0.2),
    ],
)
def test_nets_with_kinks_do_not_stall(kind: str, seed: int, loss: float) -> None:
    """The first two stood at 0.578 and 0.210 for good, where L-BFGS goes on to 0.001."""
    run = train(kind, seed, steps=16)
    assert not run.stalled, run
    assert run.loss < loss


@pytest.mark.parametrize("preconditioner", ["auto", "identity"])
def test_a_saturated_classifier_with_little_decay_begins(preconditioner: str) -> None:
    """Its curvature is that of the decay alone, so the first step tried is 1e9 long.

    At the points beside θ where the noise was measured the loss had 17 digits before the point.
    Their rounding counted as noise, and every step was refused.
    """
    inputs, labels = map(torch.tensor, load_wine(return_X_y=True))  # as they are, up to 1,680
    model = make_perceptron([13, 100, 3], "relu", np.random.RandomState(2), torch.float64)
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 1e-6},
        {"params": [model[0].bias, model[2].bias]},
    ]
    optimizer = KSD(model, nn.CrossEntropyLoss(), groups, preconditioner=preconditioner)
    first = optimizer.step((inputs, labels))
    assert first.status.moved, first
    assert first.noise < 1e-9 * first.loss


def bent(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss with its minimum at a kink, beside which the gradient never is zero."""
    residual = (outputs - targets).squeeze(1)
    return torch.where(residual > 0, residual, -2 * residual) + residual.square() / 2


def repeated(samples: int) -> tuple[nn.Linear, tuple[torch.Tensor, torch.Tensor]]:
    """A net at the minimum of `bent`, exactly, and its data: one sample many times."""
    model = nn.Linear(6, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.fill_(0.7)
    inputs = torch.linspace(-1, 1, 6).expand(samples, 6).clone()
    return model, (inputs, torch.full((samples, 1), 0.7))


def refused(optimizer: KSD, data: Any, most: int = 6) -> StepResult:
    """The first step that finds nothing any more."""
    for _ in range(most):
        result: StepResult = optimizer.step(data)
        if result.status is Status.NO_DECREASE:
            return result
    raise AssertionError(f"no step was refused: {result}")


def test_refused_steps_have_larger_sets_and_then_a_longer_basis() -> None:
    model, data = repeated(200)
    optimizer = KSD(model, bent, subset_size=20, dimension=2, preconditioner="identity")
    results = [refused(optimizer, data)]
    results += [optimizer.step(data) for _ in range(4)]
    assert all(result.status is Status.NO_DECREASE for result in results)
    assert [result.objective_samples for result in results] == [20, 80, 200, 200, 200]
    assert [result.curvature_samples for result in results] == [20, 80, 200, 200, 200]
    assert "larger sets" in results[0].reason
    assert "a basis of 4" in results[2].reason
    assert "a basis of 7" in results[3].reason  # as many as there are parameters
    assert "nothing is left to change" in results[4].reason
    assert optimizer.param_groups[0]["longer_basis"] == 7


def test_a_step_that_is_taken_takes_the_changes_back() -> None:
    model, data = repeated(200)
    optimizer = KSD(model, bent, subset_size=20, dimension=2, preconditioner="identity")
    refused(optimizer, data)
    for _ in range(3):
        optimizer.step(data)
    other = data[0], data[1] + 1  # of which there is something to learn
    assert optimizer.step(other).objective_samples == 200
    group = optimizer.param_groups[0]
    assert (group["longer_basis"], group["larger_sets"]) == (3, 2)
    optimizer.step((data[0], data[1] - 1))
    assert (group["longer_basis"], group["larger_sets"]) == (0, 2)  # 3 // 2 is less than K
    result = optimizer.step((data[0], data[1] + 2))
    assert (group["longer_basis"], group["larger_sets"]) == (0, 1)
    assert result.rank <= 2 + 3


def test_the_result_of_a_refused_step_has_the_noise_of_the_gradient() -> None:
    """At the minimum the gradient is nothing but its rounding, and both are told."""
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    data = torch.randn(50, 5), torch.randn(50, 1)
    optimizer = KSD(model, nn.MSELoss(), weight_decay=0.1)
    result = refused(optimizer, data, most=10)
    assert result.gradient_noise is not None
    assert 0 < result.gradient_norm < 30 * result.gradient_noise < 1e-4
    assert f"the gradient's norm is {result.gradient_norm:.2g}" in result.reason
    assert f"its noise {result.gradient_noise:.2g}" in result.reason
    moved = KSD(nn.Linear(5, 1), nn.MSELoss()).step(data)
    assert moved.gradient_noise is None


def test_a_resumed_run_goes_on_with_the_changes() -> None:
    model, data = repeated(200)
    options: dict[str, Any] = {"subset_size": 20, "dimension": 2, "preconditioner": "identity"}
    optimizer = KSD(model, bent, **options)
    refused(optimizer, data)
    optimizer.step(data)
    resumed = KSD(copy.deepcopy(model), bent, **options)
    resumed.load_state_dict(optimizer.state_dict())
    expected, found = optimizer.step(data), resumed.step(data)
    assert found.objective_samples == expected.objective_samples == 200
    assert found.reason == expected.reason


def test_sets_given_by_hand_are_not_changed() -> None:
    model, data = repeated(200)
    optimizer = KSD(model, bent, dimension=2, preconditioner="identity")
    few = data[0][:30], data[1][:30]
    for _ in range(6):
        result = optimizer.step(data, curvature_data=few, objective_data=few)
        assert result.objective_samples == result.curvature_samples == 30
    assert result.status is Status.NO_DECREASE
    assert optimizer.param_groups[0]["larger_sets"] == 0
    assert optimizer.param_groups[0]["longer_basis"] > 2


def test_a_basis_is_no_longer_than_the_memory_for_activations() -> None:
    model, data = repeated(50)
    four_vectors = 4 * 7 * 4
    optimizer = KSD(
        model,
        bent,
        dimension=2,
        preconditioner="identity",
        activation_memory=four_vectors,
    )
    dimensions, reasons = set(), ""
    for _ in range(12):
        reasons += optimizer.step(data).reason
        dimensions.add(optimizer.param_groups[0]["longer_basis"])
    assert dimensions == {4}
    assert "nothing is left to change" in reasons


def test_a_step_that_lr_scaled_away_changes_nothing() -> None:
    model, data = repeated(50)
    optimizer = KSD(model, bent, lr=0.0)
    result = optimizer.step((data[0], data[1] + 1))
    assert result.reason == SCALED_AWAY
    assert not escalation.is_under_way(optimizer.param_groups[0])


def test_the_noise_of_a_long_step_is_rounding() -> None:
    """Losses of nearly nothing behind steps of thousands: it was estimated at many times them."""
    torch.manual_seed(9)
    inputs, targets = torch.randn(60, 6), torch.randint(0, 3, (60,))
    layers = (nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = nn.Sequential(*layers)
    optimizer = KSD(model, nn.CrossEntropyLoss())
    for _ in range(14):
        result = optimizer.step((inputs, targets))
        # A cross-entropy of nearly nothing is itself rounding, of some 1e-8.
        assert result.noise < 1e-3 * result.loss_before + 1e-6
