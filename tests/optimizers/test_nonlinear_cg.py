"""Nonlinear CG on models: quadratics, SciPy's CG on a net, and its memory across a checkpoint."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor, nn

from krylov_descent import NonlinearCG, Objective, Status
from tests.optimizers.nets import (
    Reversed,
    classes,
    net,
    parameters_of,
    through_a_file,
)

FORMULAS: list[Any] = ["polak-ribiere", "hestenes-stiefel"]


@pytest.mark.parametrize("formula", FORMULAS)
def test_least_squares_in_as_many_iterations_as_parameters(formula: Any) -> None:
    inputs = torch.randn(50, 4, dtype=torch.float64)
    targets = torch.randn(50, 2, dtype=torch.float64)
    model = nn.Linear(4, 2, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = NonlinearCG(
        model, nn.MSELoss(), formula=formula, iterations=8, slope_tolerance=1.01e-4
    )
    result = optimizer.step((inputs, targets))
    assert result.iterations <= 8
    solution = torch.linalg.lstsq(inputs, targets).solution.T
    assert float((model.weight.detach() - solution).norm()) < 1e-4 * float(
        (before - solution).norm()
    )


@pytest.mark.parametrize("formula", FORMULAS)
def test_on_a_net_it_is_as_good_as_scipys(formula: Any) -> None:
    data = classes(dtype=torch.float64)
    model = net(torch.float64)
    objective = Objective(copy.deepcopy(model), nn.CrossEntropyLoss())

    def function(point: Any) -> tuple[float, Any]:
        objective.parameters.assign(torch.from_numpy(np.asarray(point)))
        found = objective.value_and_gradient(data)
        return found.value, found.gradient.numpy()

    theirs = scipy.optimize.minimize(
        function,
        parameters_of(model).numpy(),
        jac=True,
        method="CG",
        options={"maxiter": 60, "gtol": 0.0},
    )
    optimizer = NonlinearCG(model, nn.CrossEntropyLoss(), formula=formula, iterations=20)
    results = [optimizer.step(data) for _ in range(3)]
    assert results[-1].loss_after < 1.05 * theirs.fun
    assert sum(result.evaluations for result in results) < 1.2 * theirs.nfev


def test_steps_go_on_where_the_last_one_ended() -> None:
    # Three steps of four iterations are one of twelve, up to what the noise may decide.
    whole, parts = net(torch.float64), net(torch.float64)
    data = classes(dtype=torch.float64)
    NonlinearCG(whole, nn.CrossEntropyLoss(), iterations=12).step(data)
    optimizer = NonlinearCG(parts, nn.CrossEntropyLoss(), iterations=4)
    for _ in range(3):
        optimizer.step(data)
    torch.testing.assert_close(parameters_of(parts), parameters_of(whole), rtol=1e-6, atol=1e-8)
    # A new one each time is steepest descent at every fourth iteration, and ends elsewhere.
    forgetful = net(torch.float64)
    for _ in range(3):
        NonlinearCG(forgetful, nn.CrossEntropyLoss(), iterations=4).step(data)
    assert float((parameters_of(forgetful) - parameters_of(whole)).norm()) > 1e-3


def test_weight_decay_belongs_to_the_objective() -> None:
    inputs, targets = torch.randn(40, 3).double(), torch.randn(40, 1).double()
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = NonlinearCG(model, nn.MSELoss(), weight_decay=0.6, iterations=40)
    result = optimizer.step((inputs, targets))
    # ∂/∂w of mean (xᵀw - y)² + 0.3‖w‖².
    ridge = torch.linalg.solve(
        2 * inputs.T @ inputs / 40 + 0.6 * torch.eye(3).double(), 2 * inputs.T @ targets / 40
    )
    torch.testing.assert_close(model.weight.detach().T, ridge, rtol=1e-5, atol=1e-6)
    error = (inputs @ ridge - targets).square().mean() + 0.3 * ridge.square().sum()
    assert result.loss_after == pytest.approx(float(error))


def test_float32_ends_at_its_noise_with_few_evaluations() -> None:
    model = net()
    optimizer = NonlinearCG(model, nn.CrossEntropyLoss(), weight_decay=0.05)
    results = [optimizer.step(classes()) for _ in range(15)]
    assert results[-1].gradient_norm < 1e-4
    exact = net(torch.float64)
    reference = NonlinearCG(exact, nn.CrossEntropyLoss(), weight_decay=0.05)
    for _ in range(15):
        reference.step(classes(dtype=torch.float64))
    best = Objective(exact, nn.CrossEntropyLoss(), params=reference.param_groups).value(
        classes(dtype=torch.float64)
    )
    lowest = min(result.loss_after for result in results)
    # Where a direction is flat, rounding decides where it ends: up to 1.2e-5 above, as seen.
    assert lowest == pytest.approx(best, rel=5e-5)
    assert 0 < results[0].noise < 1e-6
    # At the noise a step gives up soon, instead of using up its line searches.
    assert results[-1].evaluations < 25


# Steps that go wrong --------------------------------------------------------------------------


def test_without_a_decrease_nothing_changes_and_the_memory_is_dropped() -> None:
    def uphill(outputs: Tensor, _: Tensor) -> Tensor:
        turned: Tensor = Reversed.apply(outputs)  # type: ignore[no-untyped-call]
        return turned.square().sum(1)

    model = net()
    before = parameters_of(model)
    optimizer = NonlinearCG(model, uphill)
    result = optimizer.step(classes())
    assert result.status is Status.NO_DECREASE
    assert torch.equal(parameters_of(model), before)
    assert optimizer._memory() is None


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("scale", [10.0**-k for k in range(18, 24)])
def test_squares_of_gradients_may_underflow(formula: Any, scale: float) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return scale * nn.functional.cross_entropy(outputs, targets, reduction="none")

    model = net()
    optimizer = NonlinearCG(model, loss, formula=formula)
    for _ in range(5):
        before = parameters_of(model)
        assert optimizer.step(classes()).status is Status.MOVED
        assert not torch.equal(parameters_of(model), before)


def test_a_norm_whose_square_is_zero_is_no_stationary_point() -> None:
    model = nn.Linear(1, 1, bias=False)
    result = NonlinearCG(model, lambda outputs, _: 1e-30 * outputs[:, 0]).step(
        (torch.ones(8, 1), torch.zeros(8))
    )
    assert result.gradient_norm == pytest.approx(1e-30)
    assert result.status is Status.MOVED


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("formula", "fletcher"),
        ("iterations", 0),
        ("slope_tolerance", 0.0),
        ("slope_tolerance", 1.0),
        ("lr", -1.0),
    ],
)
def test_bad_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        NonlinearCG(net(), nn.CrossEntropyLoss(), **{option: value})


# Resuming and the torch.optim contract --------------------------------------------------------


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_resumed_run_goes_on_bit_for_bit(formula: Any, tmp_path: Path) -> None:
    def make(model: nn.Module) -> NonlinearCG:
        return NonlinearCG(model, nn.CrossEntropyLoss(), formula=formula, iterations=3)

    model = net()
    optimizer = make(model)
    for _ in range(3):
        optimizer.step(classes())
    saved = through_a_file([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint")
    losses = [optimizer.step(classes()).loss_after for _ in range(3)]

    fresh = net(seed=9)
    fresh.load_state_dict(saved[0])
    resumed = make(fresh)
    resumed.load_state_dict(saved[1])
    assert [resumed.step(classes()).loss_after for _ in range(3)] == losses
    assert torch.equal(parameters_of(fresh), parameters_of(model))

    # And not by chance: without the memory it goes another way.
    other = net()
    other.load_state_dict(saved[0])
    assert make(other).step(classes()).loss_after != losses[0]


def test_a_call_without_data_creates_the_state_and_changes_nothing() -> None:
    model = net()
    before = parameters_of(model)
    optimizer = NonlinearCG(model, nn.CrossEntropyLoss())
    assert optimizer.step() is None
    assert torch.equal(parameters_of(model), before)
    for p in model.parameters():
        for key in ("direction", "gradient"):
            assert torch.equal(optimizer.state[p][key], torch.zeros_like(p))
    untouched = NonlinearCG(copy.deepcopy(model), nn.CrossEntropyLoss())
    assert optimizer.step(classes()).loss_after == untouched.step(classes()).loss_after


def test_the_learning_rate_scales_the_step() -> None:
    steps = {}
    for lr in (1.0, 0.5, 0.0):
        model = net(torch.float64)
        before = parameters_of(model)
        optimizer = NonlinearCG(model, nn.CrossEntropyLoss(), lr=lr, iterations=2)
        result = optimizer.step(classes(dtype=torch.float64))
        assert result.status is (Status.MOVED if lr else Status.NO_DECREASE)
        steps[lr] = parameters_of(model) - before
        value = Objective(model, nn.CrossEntropyLoss()).value(classes(dtype=torch.float64))
        assert result.loss_after == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(steps[0.5], 0.5 * steps[1.0])
    assert not steps[0.0].any()


def test_batches_in_another_order_each_time_are_no_noise() -> None:
    class Shuffled(list[Any]):
        def __iter__(self) -> Any:
            return (self[int(i)] for i in torch.randperm(len(self)))

    inputs, targets = classes(dtype=torch.float64)
    shuffled = Shuffled(zip(inputs.split(10), targets.split(10), strict=True))
    result = NonlinearCG(net(torch.float64), nn.CrossEntropyLoss()).step(shuffled)
    assert result.status is Status.MOVED
    assert result.noise < 1e-14


def test_the_result_says_what_it_cost() -> None:
    result = NonlinearCG(net(), nn.CrossEntropyLoss(), iterations=5).step(classes())
    assert (result.samples, result.objective_samples, result.iterations) == (60, 60, 5)
    # Evaluations, and four forward passes for the noise.
    assert result.passes == pytest.approx(result.evaluations + 4)
    assert result.evaluations >= 6
