"""Is it a mean over independent samples, and what does it need?"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from krylov_descent.curvature.products import Curvature
from krylov_descent.objective.buffers import buffers_kept
from krylov_descent.objective.contract_probe import PROBE_SAMPLES
from krylov_descent.objective.losses import LossContractError
from krylov_descent.objective.objective import Objective
from krylov_descent.runtime.precision import derivatives_in_tf32
from tests.problems import PAIRS, make

SEEDED = torch.Generator().manual_seed(1)
DATA = torch.randn(12, 4, generator=SEEDED), torch.randn(12, 3, generator=SEEDED)


def _net(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), *between, nn.Linear(3, 3))


def _state(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# Refused ------------------------------------------------------------------------------------------


class RandomForward(nn.Linear):
    """Noise that belongs to no module of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(())


def _random_loss(z: Tensor, t: Tensor) -> Tensor:
    return (z - t).square().sum(1) * torch.rand(len(z))


def _contrastive(z: Tensor, t: Tensor) -> Tensor:
    """Each sample against all the others of its batch."""
    likeness = z @ z.T
    return nn.functional.cross_entropy(likeness, torch.arange(len(z)), reduction="none")


def _centred(z: Tensor, t: Tensor) -> Tensor:
    return (z - z.mean(0)).square().sum(1)


RANDOM = "same samples gave two different losses"
MIXED = "samples are mixed"
REFUSED: dict[str, tuple[nn.Module, Any, str]] = {
    "dropout": (_net(nn.Dropout(0.5)), nn.MSELoss(), rf"{RANDOM}.*1 \(Dropout\).*model\.eval\(\)"),
    "alpha dropout": (_net(nn.AlphaDropout(0.5)), nn.MSELoss(), rf"{RANDOM}.*1 \(AlphaDropout\)"),
    "noise in the model": (
        RandomForward(4, 3),
        nn.MSELoss(),
        rf"{RANDOM}.*randomness out of forward and loss",
    ),
    "noise in the loss": (_net(), _random_loss, rf"{RANDOM}.*randomness out of forward and loss"),
    "batch statistics": (
        _net(nn.BatchNorm1d(3)),
        nn.MSELoss(),
        rf"{MIXED}.*1 \(BatchNorm1d\).*model\.eval\(\)",
    ),
    "contrastive loss": (_net(), _contrastive, rf"{MIXED}.*loss a mean over independent samples"),
    "centred outputs": (_net(), _centred, rf"{MIXED}.*loss a mean over independent samples"),
    "broadcast targets": (
        nn.Sequential(nn.Linear(4, 1)),
        lambda z, t: (z - t[:, 0]).square().mean(1),  # [N, 1] - [N] is [N, N]
        MIXED,
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mean_over_samples_is_refused(name: str) -> None:
    model, loss, message = REFUSED[name]
    before = [p.detach().clone() for p in model.parameters()]
    objective = Objective(model, loss)
    for method in (
        objective.value,
        objective.losses,
        objective.value_and_gradient,
        objective.value_gradient_and_squares,
    ):
        with pytest.raises(LossContractError, match=message):
            method(DATA)
    assert _same(before, [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("samples", [2, 3])
def test_batch_statistics_of_a_few_samples_are_refused(samples: int) -> None:
    # A half of one sample has no statistics at all: torch raises, and the probe explains.
    objective = Objective(_net(nn.BatchNorm1d(3)), nn.MSELoss())
    with pytest.raises(LossContractError, match=r"half of them.*1 \(BatchNorm1d\).*model\.eval"):
        objective.value((DATA[0][:samples], DATA[1][:samples]))


def test_dropout_between_recurrent_layers_is_named() -> None:
    lstm = nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True)
    objective = Objective(lstm, nn.MSELoss(), forward=lambda m, x: m(x.unsqueeze(1))[0][:, 0])
    with pytest.raises(LossContractError, match=rf"{RANDOM}.*model \(LSTM\)"):
        objective.value(DATA)


def test_an_error_of_the_model_itself_is_passed_on() -> None:
    objective = Objective(nn.Linear(5, 3), nn.MSELoss())
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        objective.value(DATA)


# Accepted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [nn.Dropout(0.5), nn.BatchNorm1d(3)])
def test_the_same_in_eval_mode_is_accepted(between: nn.Module) -> None:
    model = _net(between).eval()
    expected = float(nn.functional.mse_loss(model(DATA[0]), DATA[1]).detach())
    assert Objective(model, nn.MSELoss()).value(DATA) == pytest.approx(expected, rel=1e-6)


class Counting(nn.Module):
    """Its buffer changes with each call, and nothing comes of it."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("place", [0, 2])
def test_buffers_that_follow_the_weights_are_refused_in_training_mode(place: int) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        spectral_norm(model[place])
        with pytest.raises(LossContractError, match=r"more than one loss|two different.*eval\(\)"):
            Objective(model, nn.MSELoss()).value(DATA)
        Objective(model.eval(), nn.MSELoss()).value(DATA)


def test_a_buffer_that_only_counts_is_accepted() -> None:
    Objective(_net(Counting()), nn.MSELoss()).value(DATA)


class Positive(nn.Module):
    """Fails where its parameters are not in order, as a constrained one may."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bounds = nn.Linear(4, 3), nn.Parameter(torch.tensor([1.0, 1.1]))
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.bounds[0] > self.bounds[1]:
            raise ValueError("out of order")
        z: Tensor = self.linear(x) * self.bounds.sum() * self.one
        return z


def test_a_model_that_is_not_everywhere_is_accepted() -> None:
    Objective(Positive(), nn.MSELoss()).value(DATA)


def test_dropout_that_drops_nothing_is_accepted() -> None:
    Objective(_net(nn.Dropout(0.0)), nn.MSELoss()).value(DATA)


def test_a_single_sample_is_accepted() -> None:
    Objective(_net(), nn.MSELoss()).value((DATA[0][:1], DATA[1][:1]))


def test_losses_that_are_not_finite_are_accepted() -> None:
    # That is for the step to report.
    inputs = DATA[0].clone()
    inputs[3] = torch.nan
    inputs[5] = torch.inf
    assert Objective(_net(), nn.MSELoss()).value((inputs, DATA[1])) != 0.0


def test_only_a_few_samples_are_looked_at() -> None:
    seen = list[int]()

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(len(x))
        z: Tensor = model(x)
        return z

    objective = Objective(_net(), nn.MSELoss(), forward=forward)
    objective.value(DATA)
    assert seen[-1] == 12
    assert max(seen[:-1]) == PROBE_SAMPLES


# When it looks again ------------------------------------------------------------------------------


def _counted(model: nn.Module) -> tuple[Objective, Callable[[], int]]:
    calls = list[int]()

    def loss(z: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        return (z - t).square().sum(1)

    def count() -> int:
        before = len(calls)
        objective.value(DATA)
        return len(calls) - before

    objective = Objective(model, loss)
    return objective, count


def test_it_looks_once() -> None:
    _, count = _counted(_net())
    assert count() > 1
    assert count() == 1
    assert count() == 1


def test_it_looks_again_when_a_training_flag_changes() -> None:
    model = _net(nn.Dropout(0.5)).eval()
    _, count = _counted(model)
    count()
    assert count() == 1
    model.train()
    with pytest.raises(LossContractError, match="Dropout"):
        count()
    model.eval()
    count()


def test_it_looks_again_when_a_module_changes() -> None:
    model = _net(nn.Tanh())
    assert isinstance(model, nn.Sequential)
    _, count = _counted(model)
    count()
    model[1] = nn.Dropout(0.5)
    with pytest.raises(LossContractError, match="Dropout"):
        count()
    for _ in range(20):  # the last one may get the address of the one that was looked at
        model[1] = nn.Tanh()
        model[1] = nn.ReLU()
        assert count() > 1
        assert count() == 1


def test_it_looks_again_when_the_first_batch_had_one_sample() -> None:
    objective = Objective(_net(), _centred)
    objective.value([(DATA[0][:1], DATA[1][:1])])
    with pytest.raises(LossContractError, match=MIXED):
        objective.value(DATA)


def test_it_looks_again_until_gradients_have_told_something() -> None:
    last = nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), last)
    nn.init.zeros_(last.weight)
    objective, count = _counted(model)
    assert count() > 1
    assert objective.network.trusted_layers == {"2"}
    assert count() > 1
    nn.init.normal_(last.weight)
    assert count() > 1
    assert objective.network.trusted_layers == {"0", "2"}
    assert count() == 1


def test_a_layer_that_stays_dead_is_looked_at_once_a_step() -> None:
    last = nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), last)
    nn.init.zeros_(last.weight)
    objective, count = _counted(model)
    count()
    known = objective.findings
    objective.refresh([{"params": list(model.parameters())}])
    with objective.engine.step():
        assert count() > 1
        assert count() == 1
    assert objective.findings is known  # what was made with it need not be made again


def test_samples_are_from_all_over_the_batch() -> None:
    inputs = torch.cat([torch.zeros(20, 4), torch.randn(20, 4)])
    objective = Objective(nn.Linear(4, 3, bias=False), nn.MSELoss())
    objective.value((inputs, torch.randn(40, 3)))
    assert objective.network.trusted_layers == {""}


def test_it_looks_again_when_other_parameters_are_trained() -> None:
    model = _net()
    objective, count = _counted(model)
    groups = [{"params": list(model.parameters())}]
    count()
    objective.refresh(groups)
    assert count() == 1
    model[0].requires_grad_(False)  # type: ignore[index]
    objective.refresh(groups)
    assert count() > 1


# What it leaves behind: nothing -------------------------------------------------------------------


class Reassigning(nn.Module):
    """Keeps a running mean in a buffer that is replaced, not written to."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(3))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.running = 0.9 * self.running + 0.1 * x.detach().mean(0)
        return x


@pytest.mark.parametrize(
    ("between", "refused"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.BatchNorm1d(3).eval(), False),
        (nn.Dropout(0.5), True),
        (nn.Tanh(), False),
    ],
)
def test_buffers_and_random_state_are_as_before(between: nn.Module, refused: bool) -> None:
    model = _net(between)
    before, random_state = _state(model), torch.get_rng_state()
    objective = Objective(model, nn.MSELoss())
    try:
        objective.value(DATA)
    except LossContractError:
        assert refused
    else:
        assert not refused
    assert _same(before, _state(model))
    assert torch.equal(random_state, torch.get_rng_state())


def test_the_random_state_is_as_before_when_the_forward_pass_draws() -> None:
    objective = Objective(RandomForward(4, 3), nn.MSELoss())
    state = torch.get_rng_state()
    with pytest.raises(LossContractError):
        objective.value(DATA)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("between", [Reassigning(), nn.BatchNorm1d(3)])
def test_buffers_kept_restores_the_very_tensors(between: nn.Module) -> None:
    before = dict(between.named_buffers())
    values = _state(between)
    with contextlib.suppress(ZeroDivisionError), buffers_kept(between):
        between(torch.randn(5, 3))
        assert not _same(values, _state(between))
        _ = 1 // 0  # an error in the forward pass must not keep the buffers from coming back
    after = dict(between.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())
    assert _same(values, _state(between))


class Constant(nn.Module):
    """A mask that is one number in memory, and a view of the weight."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("mask", torch.ones(1).expand(4))
        self.register_buffer("flat", self.linear.weight.data.view(-1))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.linear(x * self.mask)
        return z


def test_buffers_that_are_expanded_or_parameters_are_left_alone() -> None:
    model = Constant()
    before = model.linear.weight.detach().clone()
    with buffers_kept(model), torch.no_grad():
        model.linear.weight.mul_(2)
    assert torch.equal(model.linear.weight, 2 * before)
    assert torch.equal(model.get_buffer("mask"), torch.ones(4))


# Findings -----------------------------------------------------------------------------------------


def test_an_error_notes_that_the_data_have_another_dtype() -> None:
    inputs, targets = (t.double() for t in DATA)
    with pytest.raises(RuntimeError) as caught:
        Objective(_net(), nn.MSELoss()).value((inputs, targets))
    (note,) = caught.value.__notes__
    assert "torch.float64" in note
    assert "torch.float32" in note
    with pytest.raises(RuntimeError) as caught:
        Objective(_net(), nn.MSELoss()).value((DATA[0][:, :1], DATA[1]))
    assert not hasattr(caught.value, "__notes__")


def test_values_and_derivatives_have_an_epsilon_each() -> None:
    objective = Objective(_net(), nn.MSELoss())
    objective.value(DATA)
    found = dataclasses.replace(objective.findings, device=torch.device("cuda"))
    float32 = torch.finfo(torch.float32).eps
    assert (found.epsilon, found.derivative_epsilon) == (float32, float32)
    with derivatives_in_tf32(True):
        assert (found.epsilon, found.derivative_epsilon) == (float32, 2.0**-10)


@pytest.mark.parametrize(
    ("dtype", "epsilon"),
    [(torch.float32, 2.0**-23), (torch.float64, 2.0**-52)],
)
def test_epsilon_is_that_of_the_parameters(dtype: torch.dtype, epsilon: float) -> None:
    objective = Objective(_net().to(dtype), nn.MSELoss())
    objective.value((DATA[0].to(dtype), DATA[1].to(dtype)))
    assert objective.findings.epsilon == epsilon


def test_epsilon_is_that_of_autocast() -> None:
    objective = Objective(_net(nn.Tanh()), nn.MSELoss())
    with torch.autocast("cpu", torch.bfloat16), objective.network.algebra():
        objective.value(DATA)
    assert objective.findings.epsilon == torch.finfo(torch.bfloat16).eps == 2.0**-7


def test_it_looks_again_when_autocast_is_switched() -> None:
    objective = Objective(_net(nn.Tanh()), nn.MSELoss())
    objective.value(DATA)
    with torch.autocast("cpu", torch.bfloat16), objective.network.algebra():
        objective.value(DATA)
        assert objective.findings.epsilon == 2.0**-7
    objective.value(DATA)
    assert objective.findings.epsilon == 2.0**-23


def test_epsilon_is_that_of_the_coarsest_part() -> None:
    def forward(model: nn.Module, x: Tensor) -> Tensor:
        z: Tensor = model(x)
        return z.half().float()

    objective = Objective(_net(), nn.MSELoss(), forward=forward)
    objective.value(DATA)
    assert objective.findings.epsilon == 2.0**-10


@pytest.mark.parametrize(("model", "loss"), [pair for pair in PAIRS if pair[1] == "per-sample"])
def test_no_small_model_is_refused_and_none_differentiates(model: str, loss: str) -> None:
    problem = make(model, loss)
    objective = Objective(problem.model, problem.loss)
    objective.value(problem.data)
    assert not objective.findings.forward_differentiates
    assert objective.findings.bytes_per_sample >= 8  # at least one float64


def test_bytes_per_sample_are_those_autograd_keeps() -> None:
    model = nn.Sequential(nn.Linear(4, 100), nn.Sigmoid(), nn.Linear(100, 3))
    objective = Objective(model, lambda z, t: (z - t).square().sum(1))
    objective.value(DATA)
    # Sigmoid's output, the difference and the loss, in float32; the inputs are the data's own.
    assert objective.findings.bytes_per_sample == 4 * (100 + 3 + 1)


class Slopes(nn.Module):
    """Differentiates by torch.func, which saved-tensor hooks must not watch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda t: self.net(t).sum())(x)
        return slope


def test_a_forward_pass_that_differentiates_by_torch_func_is_accepted() -> None:
    torch.manual_seed(0)
    model = Slopes().double()
    x, y = torch.randn(12, 3).double(), torch.randn(12, 3).double()
    objective = Objective(model, nn.MSELoss())
    found = objective.value_and_gradient((x, y))
    expected = torch.autograd.grad(nn.MSELoss()(model(x), y), list(model.parameters())[:-1])
    torch.testing.assert_close(found.gradient[:-1], torch.cat([g.reshape(-1) for g in expected]))
    # At least the 8 activations, and no more than some dozen vectors of that length.
    assert 8 * 8 <= objective.findings.bytes_per_sample <= 12 * 8 * 8
    vector = torch.randn_like(found.gradient)
    product = Curvature("hessian").at(objective, (x, y))
    step = 1e-5 * vector
    start = objective.parameters.copy()
    slopes = []
    for sign in (1, -1):
        objective.parameters.assign(start + sign * step)
        slopes.append(objective.value_and_gradient((x, y)).gradient)
    objective.parameters.assign(start)
    torch.testing.assert_close(
        product(vector), (slopes[0] - slopes[1]) / 2e-5, rtol=1e-5, atol=1e-8
    )
    assert product.kept
