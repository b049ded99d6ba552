"""Damped steps: which trainings begin with them, how they end, and that they resume."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import KSD, Status, StepResult, Term
from krylov_descent.algorithms.damped_directions import least_damping
from krylov_descent.curvature import damped_basis
from krylov_descent.optimizers.ksd import damped_phase
from krylov_descent.optimizers.ksd.subset_growth import DOUBLINGS, MOST_DOUBLINGS
from tests.engines import RECORDING, check_alike, device_of, use
from tests.terms import derivative, laplace, points, small_net, terms_of


def wide_net(width: int = 20) -> nn.Sequential:
    """With more parameters than there are `residuals`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()


def residuals() -> dict[str, Term]:
    """An equation at 20 points, and values at 13 others."""
    sides = points(13, 1)
    values = Term(lambda net, x: net(x) - x.sum(1, keepdim=True), sides, weight=5.0)
    return {"equation": Term(laplace, points(20)), "boundary": values}


def was_damped(result: StepResult) -> bool:
    return result.damping is not None and result.products == 0 and result.rank > 0


def group(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": 0, DOUBLINGS: 0}
    damped_phase.begin(found)
    return found | changes


@pytest.fixture
def few_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damped steps for the small problems here, too."""
    monkeypatch.setattr(damped_phase, "FEWEST_RESIDUALS", 10)
    monkeypatch.setattr(damped_basis, "FEWEST_DIRECTIONS", 1)


def poisson(inside: int) -> tuple[nn.Module, dict[str, Term]]:
    """-Δu = 2π² sin πx sin πy in the unit square, for a net with 609 parameters."""

    def equation(net: nn.Module, x: Tensor) -> Tensor:
        return laplace(net, x) - 1 + 2 * math.pi**2 * (math.pi * x).sin().prod(1)

    sides = points(80, 1)
    row = torch.arange(80)
    sides[row, row % 2] = (row // 2 % 2).double()
    torch.manual_seed(0)
    layers = [nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)]
    net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 1)).double()
    boundary = Term(lambda net, x: net(x), sides, weight=10.0)
    return net, {"equation": Term(equation, points(inside)), "boundary": boundary}


def test_five_hundred_residuals_and_more_parameters_begin_with_damped_steps() -> None:
    assert not was_damped(KSD(*poisson(419)).step())
    optimizer = KSD(*poisson(420))
    results = [optimizer.step() for _ in range(40)]
    assert all(map(was_damped, results))
    assert all(r.curvature_samples == r.objective_samples == r.samples == 500 for r in results)
    assert all(r.iterations <= damped_phase.ITERATIONS for r in results)
    assert results[-1].loss_after < 1e-5 * results[0].loss


def test_krylov_steps_on_all_samples_follow(few_residuals: None) -> None:
    optimizer = KSD(wide_net(), residuals())
    results = [optimizer.step() for _ in range(3)]
    optimizer.param_groups[0][damped_phase.HALVED_AT] = 3 - damped_phase.PATIENCE_AT_FIRST
    last_damped, first_krylov = optimizer.step(), optimizer.step()
    assert all(map(was_damped, [*results, last_damped]))
    assert last_damped.dimension_reason.endswith("Krylov steps follow")
    assert first_krylov.products == first_krylov.rank
    assert first_krylov.samples == first_krylov.objective_samples


def test_krylov_steps_follow_a_step_that_finds_no_decrease(few_residuals: None) -> None:
    """A linear net meets its residuals to the last digit in a few steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.Linear(20, 1)).double()
    slope = Term(lambda net, x: derivative(net, x) - 1, points(20))
    optimizer = KSD(net, {"slope": slope})
    results = [optimizer.step() for _ in range(30)]
    refused = next(result for result in results if not result.status.moved)
    assert was_damped(results[0])
    assert refused.status is Status.NO_DECREASE
    assert not damped_phase.is_under_way(optimizer.param_groups[0])


def test_a_refusal_says_what_follows() -> None:
    found = group()
    result = KSD(small_net(), terms_of()).step()
    assert damped_phase.refused(found, result).reason == f"{result.reason}; Krylov steps follow"
    assert not damped_phase.is_under_way(found)


@pytest.mark.parametrize(
    "settings",
    [
        {"dimension": 8},
        {"subset_size": 33},
        {"curvature": "hessian"},
        {"weight_decay": 1e-3},
        {"basis_dtype": torch.bfloat16},
        {"activation_memory": 10_000},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_of_other_steps_are_followed(
    settings: dict[str, Any], few_residuals: None
) -> None:
    assert not was_damped(KSD(wide_net(), residuals(), **settings).step())


def in_float32() -> tuple[nn.Module, dict[str, Term]]:
    return wide_net().float(), {"equation": Term(laplace, points(20).float())}


def more_residuals() -> tuple[nn.Module, dict[str, Term]]:
    return small_net(), residuals()


def readings() -> tuple[nn.Module, dict[str, Term]]:
    x = points(7, 2)
    data = Term((x, x.sum(1, keepdim=True)), nn.MSELoss())
    return wide_net(), residuals() | {"data": data}


def on_a_line() -> tuple[nn.Module, dict[str, Term]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 300), nn.Tanh(), nn.Linear(300, 1)).double()
    return net, {"equation": Term(derivative, torch.linspace(0, 1, 520).double()[:, None])}


def own_size() -> tuple[nn.Module, dict[str, Term]]:
    return wide_net(), {"equation": Term(laplace, points(20), subset_size=10)}


def no_rows() -> tuple[nn.Module, dict[str, Term]]:
    """Batches of more than 10 points call the net for two halves."""

    def residual(net: nn.Module, x: Tensor) -> Tensor:
        if len(x) <= 10:
            return derivative(net, x)
        return torch.cat([derivative(net, part) for part in x.chunk(2)])

    return wide_net(), {"equation": Term(residual, points(20))}


@pytest.mark.parametrize("make", [in_float32, more_residuals, readings, own_size, no_rows])
def test_other_problems_have_krylov_steps(make: Any, few_residuals: None) -> None:
    optimizer = KSD(*make())
    result = optimizer.step()
    assert result.status is Status.MOVED
    assert not was_damped(result)
    assert not damped_phase.is_under_way(optimizer.param_groups[0])


def test_equations_in_one_dimension_have_krylov_steps() -> None:
    optimizer = KSD(*on_a_line())
    result = optimizer.step()
    assert result.status is Status.MOVED
    assert not was_damped(result)
    assert not damped_phase.is_under_way(optimizer.param_groups[0])


def test_large_systems_are_for_a_gpu(few_residuals: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(damped_phase, "MOST_RESIDUALS_ON_CPU", 32)
    assert not was_damped(KSD(wide_net(), residuals()).step())


def test_given_iterations_are_made(few_residuals: None) -> None:
    result = KSD(wide_net(), residuals(), bfgs_iterations=2).step()
    assert was_damped(result)
    assert result.iterations == 2


@pytest.mark.parametrize("engine", RECORDING)
def test_recorded_steps_are_those_that_are_not(engine: str, few_residuals: None) -> None:
    device = device_of(engine)

    def trained(run_by: str) -> KSD:
        terms = {"equation": Term(laplace, points(20).to(device))}
        optimizer = KSD(wide_net().to(device), terms)
        use(run_by, optimizer)
        return optimizer

    recorded, eager = trained(engine), trained("eager")
    ours, theirs = ([optimizer.step() for _ in range(4)] for optimizer in (recorded, eager))
    assert all(map(was_damped, ours))
    check_alike(ours, theirs, rel=1e-3)
    for optimizer in (recorded, eager):
        damped_phase.end(optimizer.param_groups[0])
    check_alike([recorded.step()], [eager.step()], rel=1e-2)


def test_a_resumed_run_continues_within_the_phase(few_residuals: None) -> None:
    net = wide_net()
    optimizer = KSD(net, residuals())
    for _ in range(3):
        optimizer.step()
    state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(net.state_dict())
    expected = [optimizer.step().loss_after for _ in range(3)]
    again = wide_net()
    again.load_state_dict(weights)
    resumed = KSD(again, residuals())
    resumed.load_state_dict(state)
    results = [resumed.step() for _ in range(3)]
    assert all(map(was_damped, results))
    assert [r.loss_after for r in results] == expected


def test_a_state_from_before_the_phase_existed_goes_on_with_krylov_steps(
    few_residuals: None,
) -> None:
    net = wide_net()
    optimizer = KSD(net, residuals(), dimension=8)
    optimizer.step()
    state = optimizer.state_dict()
    for entry in damped_phase.ENTRIES:
        del state["param_groups"][0][entry]
    resumed = KSD(net, residuals())
    resumed.load_state_dict(state)
    assert not was_damped(resumed.step())


def test_the_plateau_at_first_is_waited_for() -> None:
    found = group()
    reasons = [damped_phase.learn(found, 1e-3, 1.0, 0.9) for _ in range(120)]
    assert not any(reasons[:-1])
    assert reasons[-1] == "120 damped steps did not halve the loss; Krylov steps follow"
    assert not damped_phase.is_under_way(found)
    assert found[DOUBLINGS] == MOST_DOUBLINGS


def test_after_the_fall_little_patience_is_left() -> None:
    found, loss, steps = group(), 1.0, 0
    while loss > 1e-6:
        assert not damped_phase.learn(found, 1e-3, loss, loss / 3)
        loss, steps = loss / 3, steps + 1
    while damped_phase.is_under_way(found):
        reason = damped_phase.learn(found, 1e-3, loss, 0.999 * loss)
        loss, steps = 0.999 * loss, steps + 1
    assert reason.startswith("40 damped steps")
    assert steps == 13 + 40


def test_the_middle_damping_follows_the_steps_down_to_rounding() -> None:
    found = group()
    damped_phase.learn(found, 1e-5, 1.0, 0.9)
    assert found[damped_phase.DAMPING] == 1e-5
    damped_phase.learn(found, 1e-20, 0.9, 0.8)
    assert found[damped_phase.DAMPING] == least_damping(torch.float64)


def test_a_phase_without_steps_leaves_the_sets_alone() -> None:
    found = group()
    damped_phase.end(found)
    assert found[DOUBLINGS] == 0
    assert not damped_phase.is_under_way(found)
