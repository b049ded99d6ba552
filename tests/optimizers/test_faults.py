"""Faults in a step: a result that says so, and parameters bit for bit as before."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from krylov_descent import KSD, Status, StepResult
from tests.optimizers.unchanged import network, samples, unchanged
from tests.preconditioners import at_once


def refused(optimizer: KSD, data: Any, **sets: Any) -> StepResult:
    with unchanged(optimizer):
        result: StepResult = optimizer.step(data, **sets)
    assert not result.status.moved
    assert result.loss_after == result.loss_before or math.isnan(result.loss_before)
    assert result.step_norm == 0
    return result


# Not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 19])
def test_a_loss_that_is_not_finite(bad: float, where: int) -> None:
    x, y = samples()
    y[where, 1] = bad
    optimizer = KSD(network(), nn.MSELoss(), dimension=3)
    assert optimizer.step(samples()).status is Status.MOVED
    result = refused(optimizer, (x, y))
    assert result.status is Status.NOT_FINITE
    assert "the loss on A, all the data, is" in result.reason
    assert not math.isfinite(result.loss)
    assert optimizer.step(samples()).status is Status.MOVED  # no harm done


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_on_c_alone(bad: float) -> None:
    x, y = samples()
    optimizer = KSD(network(), nn.MSELoss(), dimension=3)
    optimizer.step((x, y))
    result = refused(optimizer, (x, y), objective_data=(x, y.clone().fill_(bad)))
    assert result.status is Status.NOT_FINITE
    assert "on C is not finite" in result.reason
    assert result.loss == pytest.approx(optimizer.step((x, y)).loss)


class Powers(nn.Module):
    """p ↦ p + pᵉ at p = 0: finite, with a derivative of some order that is not."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(3))
        self.exponent = exponent

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.p + self.p.pow(self.exponent))


def row_sums(outputs: Tensor, targets: None) -> Tensor:
    return outputs.sum(1)


def test_a_gradient_that_is_not_finite() -> None:
    optimizer = KSD(Powers(0.5), row_sums)
    result = refused(optimizer, (torch.ones(4, 3), None))
    assert result.status is Status.NOT_FINITE
    assert "the gradient on A is not finite" in result.reason
    assert math.isfinite(result.loss)


@pytest.mark.parametrize("preconditioner", ["identity", "fisher-diagonal", "kronecker"])
def test_a_product_that_is_not_finite(preconditioner: str) -> None:
    chosen = at_once(preconditioner)
    optimizer = KSD(Powers(1.5), row_sums, curvature="hessian", preconditioner=chosen)
    result = refused(optimizer, (torch.ones(4, 3), None))
    assert result.status is Status.NOT_FINITE
    assert "a curvature product on B is not finite" in result.reason
    assert math.isfinite(result.gradient_norm)


def test_a_product_that_is_not_finite_on_b_alone() -> None:
    x, y = samples()
    optimizer = KSD(network(), nn.MSELoss(), dimension=3)
    optimizer.step((x, y))
    result = refused(optimizer, (x, y), curvature_data=(x * math.nan, y))
    assert result.status is Status.NOT_FINITE
    assert "on B" in result.reason


def test_a_gradient_whose_squares_overflow_leads_to_a_step() -> None:
    """To the minimum of x(p + p²), which is at p = -½ for any x."""
    model = Powers(2.0)
    result = KSD(model, row_sums, curvature="hessian").step((torch.full((4, 3), 1e25), None))
    assert result.status is Status.MOVED
    torch.testing.assert_close(model.p.detach(), torch.full((3,), -0.5))


def test_a_search_that_runs_into_nan_turns_back() -> None:
    """-2p - log(1 - p) with its minimum at ½; a Newton step from -3 leads to 25."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, -3.0)

    def barrier(outputs: Tensor, targets: None) -> Tensor:
        return (-2 * outputs - (1 - outputs).log()).squeeze(1)

    optimizer = KSD(model, barrier, curvature="hessian", bfgs_iterations=30)
    result = optimizer.step((torch.ones(4, 1).double(), None))
    assert result.status is Status.MOVED
    assert float(model.weight.detach()) == pytest.approx(0.5, abs=1e-6)


# Nowhere to go ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", ["identity", "fisher-diagonal", "kronecker"])
def test_a_zero_gradient_is_stationary(preconditioner: str) -> None:
    model = network()
    x, _ = samples()
    with torch.no_grad():
        y = model(x)
    optimizer = KSD(model, nn.MSELoss(), preconditioner=at_once(preconditioner))
    result = refused(optimizer, (x, y))
    assert result.status is Status.STATIONARY
    assert result.gradient_norm == 0
    assert optimizer.step(samples()).status is Status.MOVED


def test_a_mean_gradient_of_zero_with_samples_that_disagree_is_stationary() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x = torch.ones(2, 1).double()
    result = refused(KSD(model, nn.MSELoss()), (x, torch.tensor([[1.0], [-1.0]]).double()))
    assert result.status is Status.STATIONARY


def test_no_decrease_is_refused() -> None:
    """A and B recommend a step, and C is at its minimum."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    x, y = torch.ones(4, 1), torch.ones(4, 1)
    result = refused(KSD(model, nn.MSELoss()), (x, y + 1), objective_data=(x, y))
    assert result.status is Status.NO_DECREASE
    assert result.gradient_norm > 0
    assert result.rank == 1


def test_more_dimensions_than_parameters() -> None:
    x, y = samples()
    optimizer = KSD(network(), nn.MSELoss(), dimension=1000)
    for _ in range(2):
        result = optimizer.step((x, y))
        assert result.status is Status.MOVED
        assert result.rank <= 23  # n


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "fisher"])
def test_one_sample(curvature: Any) -> None:
    optimizer = KSD(network(), nn.MSELoss(), curvature=curvature)
    x, y = samples(1)
    for data in ((x, y), [(x, y)], TensorDataset(x, y)):
        result = optimizer.step(data)
        assert result.loss_after <= result.loss_before
        assert result.samples == result.curvature_samples == result.objective_samples == 1
    assert result.loss_after < 1e-2


# Errors in the middle -----------------------------------------------------------------------------


class FailsAt:
    """A loss that raises at one of its calls."""

    def __init__(self, call: int, problem: type[BaseException]) -> None:
        self.call, self.problem, self.calls = call, problem, 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            raise self.problem("here")
        return (outputs - targets).square().mean(1)


class UnexpectedError(Exception):
    """Of a kind that nobody has heard of."""


@pytest.mark.parametrize("problem", [KeyboardInterrupt, UnexpectedError])
def test_an_error_at_any_call_of_the_loss_leaves_everything_as_before(
    problem: type[BaseException],
) -> None:
    data, never = samples(), FailsAt(-1, problem)
    reference_model = network()
    reference = KSD(reference_model, never, dimension=2)
    reference.step(data)
    calls_before, after_one = never.calls, reference.state_dict()
    reference.step(data)
    total = never.calls - calls_before
    assert total > 10
    for call in range(1, total + 1, 2):
        model, loss = network(), FailsAt(-1, problem)
        optimizer = KSD(model, loss, dimension=2)
        optimizer.step(data)
        loss.call = loss.calls + call
        with unchanged(optimizer), pytest.raises(problem, match="here"):
            optimizer.step(data)
        assert optimizer.steps == after_one["param_groups"][0]["steps"]
        # The next step is as if nothing had happened.
        optimizer.step(data)
        for p, q in zip(model.parameters(), reference_model.parameters(), strict=True):
            assert torch.equal(p, q)


def test_an_error_in_the_data_leaves_everything_as_before() -> None:
    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield samples()
        raise OSError("the disk is gone")

    optimizer = KSD(network(), nn.MSELoss(), dimension=2)
    optimizer.step(samples())
    with unchanged(optimizer), pytest.raises(OSError, match="the disk is gone"):
        optimizer.step(broken())
    assert optimizer.steps == 1
