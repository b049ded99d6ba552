"""Hessian-Free against dense matrices, chunk by chunk, and across a checkpoint."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import HessianFree, Objective, Status
from krylov_descent.algorithms.conjugate_gradient import CGResult, conjugate_gradient
from tests import dense
from tests.optimizers.nets import (
    classes,
    net,
    parameters_of,
    through_a_file,
)
from tests.problems import Problem, make

# A step against dense matrices ----------------------------------------------------------------


class Reference:
    """Martens' step with dense float64 matrices of the problem, written out once more."""

    def __init__(self, problem: Problem, kind: str, damping: float, decay: float) -> None:
        self.problem, self.damping, self.decay = problem, damping, decay
        self.matrix = {"gauss-newton": dense.gauss_newton, "hessian": dense.hessian}[kind]
        self.last: Tensor | None = None
        self.ratio = self.rate = math.nan
        self.chosen = 0

    def value(self, point: Tensor) -> float:
        losses = dense.losses_at(self.problem, point)
        return float(losses.mean() + 0.5 * self.decay * point @ point)

    def cg(self, power: float = 0.75) -> CGResult:
        theta, identity = dense.point(self.problem), torch.eye(dense.point(self.problem).numel())
        g = dense.gradient(self.problem) + self.decay * theta
        A = self.matrix(self.problem) + (self.decay + self.damping) * identity.double()
        M = (dense.squares(self.problem) + self.decay + self.damping) ** power
        start = None if self.last is None else 0.95 * self.last
        # Nine iterations: beyond them rounding takes over, as the matrix is nearly singular.
        return conjugate_gradient(
            lambda v: A @ v, g, solve=lambda v: v / M, start=start, max_iterations=9
        )

    def step(self) -> Tensor:
        """The new θ."""
        theta = dense.point(self.problem)
        found, before = self.cg(), self.value(theta)
        values = [self.value(theta + iterate.point) for iterate in found.iterates]
        index = len(values) - 1
        while index > 0 and values[index - 1] < values[index]:
            index -= 1
        d, self.chosen = found.iterates[index].point, found.iterates[index].iteration
        g = dense.gradient(self.problem) + self.decay * theta
        H = self.matrix(self.problem) + self.decay * torch.eye(theta.numel()).double()
        change = values[index] - before
        self.ratio = change / float(g @ d + d @ H @ d / 2) if change <= 0 else -math.inf
        self.rate = 1.0
        while self.value(theta + self.rate * d) > before + 0.01 * self.rate * float(g @ d):
            self.rate *= 0.8
        if self.ratio < 0.25:
            self.damping *= 1.5
        if self.ratio > 0.75:
            self.damping /= 1.5
        self.last = found.last.point
        return theta + self.rate * d


@pytest.mark.parametrize(
    ("kind", "model", "damping"),
    [
        ("gauss-newton", "mlp", 0.3),
        ("gauss-newton", "mlp", 1e-3),
        ("gauss-newton", "layernorm", 1e-2),
        ("gauss-newton", "conv", 1e-2),
        ("hessian", "mlp", 0.3),
        ("hessian", "tied", 1e-2),
    ],
)
def test_steps_are_those_of_dense_matrices(kind: Any, model: str, damping: float) -> None:
    problem = make(model, "cross-entropy")
    reference = Reference(problem, kind, damping, decay=1e-3)
    optimizer = HessianFree(
        problem.model,
        problem.loss,
        curvature=kind,
        damping=damping,
        cg_iterations=9,
        weight_decay=1e-3,
    )
    for _ in range(4):
        expected = reference.step()  # before the parameters move
        result = optimizer.step(problem.data)
        assert result.status is Status.MOVED
        torch.testing.assert_close(dense.point(problem), expected, rtol=1e-5, atol=1e-6)
        assert result.reduction_ratio == pytest.approx(reference.ratio, rel=1e-4)
        assert result.chosen_iteration == reference.chosen
        assert result.rate == pytest.approx(reference.rate)
        assert result.damping == optimizer.damping == pytest.approx(reference.damping)
        assert result.loss_after == pytest.approx(reference.value(expected), rel=1e-6)


def test_the_preconditioner_is_really_used() -> None:
    problem = make("mlp", "cross-entropy")
    with torch.no_grad():
        problem.inputs[:, 0] *= 100  # so that the parameters differ in scale
    reference = Reference(problem, "gauss-newton", 1e-3, decay=0.0)
    theta, on, off = dense.point(problem), reference.cg(), reference.cg(power=0.0)
    optimizer = HessianFree(problem.model, problem.loss, damping=1e-3, cg_iterations=9)
    optimizer.step(problem.data)
    made = optimizer._get_vector("last_iterate")
    assert made is not None
    torch.testing.assert_close(made, on.last.point, rtol=1e-6, atol=1e-8)
    assert float((made - off.last.point).norm()) > 1e-2 * float(made.norm())
    assert not torch.equal(dense.point(problem), theta)


def test_a_quadratic_objective_is_solved() -> None:
    inputs = torch.randn(200, 5, dtype=torch.float64)
    targets = inputs @ torch.randn(5, 2).double() + torch.randn(200, 2).double()
    model = nn.Linear(5, 2).double()
    optimizer = HessianFree(model, nn.MSELoss(), damping=1.0)
    # The quadratic is right, so each step lowers the damping, until no decrease is left.
    steps = 0
    while (result := optimizer.step((inputs, targets))).status.moved:
        steps += 1
    assert steps > 5
    assert optimizer.damping < 0.1
    columns = torch.cat([inputs, torch.ones(200, 1, dtype=torch.float64)], 1)
    solution = torch.linalg.lstsq(columns, targets).solution
    torch.testing.assert_close(model.weight.detach(), solution[:-1].T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.bias.detach(), solution[-1], rtol=1e-4, atol=1e-5)
    assert result.loss == pytest.approx(
        float((columns @ solution - targets).square().mean()), rel=1e-8
    )


def test_a_net_learns() -> None:
    model = net()
    optimizer = HessianFree(model, nn.CrossEntropyLoss(), damping=1.0)
    first, *_, last = [optimizer.step(classes()) for _ in range(25)]
    assert first.loss_before > 1.0
    assert last.loss_after < 0.4


# The chunk ------------------------------------------------------------------------------------


def test_the_curvature_is_that_of_the_chunk_whose_turn_it_is() -> None:
    inputs, targets = classes(dtype=torch.float64)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(7))
    for turn, position in enumerate((0, 25, 50, 15)):
        model = net(torch.float64, seed=turn)
        by_hand = copy.deepcopy(model)
        rows = order.roll(-position)[:25]
        expected = HessianFree(by_hand, nn.CrossEntropyLoss())
        expected.step((inputs, targets), curvature_data=(inputs[rows], targets[rows]))

        optimizer = HessianFree(model, nn.CrossEntropyLoss(), chunk_size=25, seed=7)
        optimizer.param_groups[0]["chunk_position"] = position
        result = optimizer.step((inputs, targets))
        assert result.curvature_samples == 25
        assert optimizer.param_groups[0]["chunk_position"] == (position + 25) % 60
        assert torch.equal(parameters_of(model), parameters_of(by_hand))


def test_batches_give_the_same_step_as_tensors() -> None:
    inputs, targets = classes(dtype=torch.float64)
    batches = list(zip(inputs.split(16), targets.split(16), strict=True))
    models = [net(torch.float64) for _ in range(2)]
    for model, data in zip(models, ((inputs, targets), batches), strict=True):
        optimizer = HessianFree(model, nn.CrossEntropyLoss(), micro_batch=7)
        for _ in range(3):
            assert optimizer.step(data).status.moved
    torch.testing.assert_close(parameters_of(models[0]), parameters_of(models[1]))


# Resuming and the torch.optim contract --------------------------------------------------------


def run(optimizer: HessianFree, steps: int) -> list[float]:
    return [optimizer.step(classes()).loss_after for _ in range(steps)]


def make_one(model: nn.Module) -> HessianFree:
    return HessianFree(model, nn.CrossEntropyLoss(), damping=1.0, chunk_size=25, seed=3)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model = net()
    optimizer = make_one(model)
    run(optimizer, 5)
    saved = through_a_file([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint")
    losses = run(optimizer, 5)

    fresh = net(seed=9)
    fresh.load_state_dict(saved[0])
    resumed = make_one(fresh)
    resumed.load_state_dict(saved[1])
    assert resumed.damping != 1.0
    assert run(resumed, 5) == losses
    assert torch.equal(parameters_of(fresh), parameters_of(model))
    assert resumed.damping == optimizer.damping
    assert resumed.steps == optimizer.steps == 10


@pytest.mark.parametrize("forgotten", ["damping", "chunk_position", "last_iterate"])
def test_each_part_of_the_memory_counts(forgotten: str) -> None:
    # If one of them were not saved, the test above would not pass by chance.
    model = net()
    optimizer = make_one(model)
    run(optimizer, 5)
    other = copy.deepcopy(model)
    changed = make_one(other)
    changed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if forgotten == "last_iterate":
        changed.state.clear()
    else:
        changed.param_groups[0][forgotten] = {"damping": 1.0, "chunk_position": 0}[forgotten]
    assert run(changed, 1) != run(optimizer, 1)


def test_a_call_without_data_creates_the_state_and_changes_nothing() -> None:
    model = net()
    before = parameters_of(model)
    optimizer = HessianFree(model, nn.CrossEntropyLoss())
    assert optimizer.step() is None
    assert torch.equal(parameters_of(model), before)
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["last_iterate"], torch.zeros_like(p))


def test_the_learning_rate_scales_the_step() -> None:
    steps = {}
    for lr in (1.0, 0.5, 0.0):
        model = net(torch.float64)
        before = parameters_of(model)
        optimizer = HessianFree(model, nn.CrossEntropyLoss(), lr=lr)
        result = optimizer.step(classes(dtype=torch.float64))
        assert result.status is (Status.MOVED if lr else Status.NO_DECREASE)
        steps[lr] = parameters_of(model) - before
        value = Objective(model, nn.CrossEntropyLoss()).value(classes(dtype=torch.float64))
        assert result.loss_after == pytest.approx(value, rel=1e-12)
    torch.testing.assert_close(steps[0.5], 0.5 * steps[1.0])
    assert not steps[0.0].any()


def test_the_result_says_what_it_cost() -> None:
    optimizer = HessianFree(net(), nn.CrossEntropyLoss(), chunk_size=30)
    first, second = optimizer.step(classes()), optimizer.step(classes())
    assert first.products == first.iterations
    assert second.products == second.iterations + 1  # the residual at the start
    for result in (first, second):
        assert (result.samples, result.curvature_samples, result.objective_samples) == (60, 30, 60)
        assert result.passes == pytest.approx(1 + result.products / 2 + result.evaluations)
        assert set(result.seconds) == {"gradient", "cg", "search"}
        assert "damping" in str(result)
