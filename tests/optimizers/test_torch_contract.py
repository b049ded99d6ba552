"""KSD as a good citizen of torch.optim: state, checkpoints, groups, schedulers, hooks, AMP."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LambdaLR, StepLR

from krylov_descent import KSD, Status
from krylov_descent.optimizers.ksd.ksd_state import PREVIOUS_STEP

SETTINGS: dict[str, Any] = {"dimension": 3, "subset_size": 12}


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def samples() -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randn(40, 5), torch.randn(40, 3)


def plain(model: nn.Module) -> KSD:
    return KSD(model, nn.MSELoss(), **SETTINGS)


def grouped(model: nn.Module) -> KSD:
    weights = [p for p in model.parameters() if p.dim() == 2]
    biases = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.9}]
    return KSD(model, nn.MSELoss(), groups, **SETTINGS)


def of_the_paper(model: nn.Module) -> KSD:
    return KSD(model, nn.MSELoss(), previous_steps=1, **SETTINGS)


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def previous_step(optimizer: KSD) -> Tensor:
    return torch.cat([s[PREVIOUS_STEP].reshape(-1) for s in optimizer.state.values()])


def trained(build: Callable[[nn.Module], KSD]) -> tuple[nn.Module, KSD]:
    model = network()
    optimizer = build(model)
    for _ in range(2):
        assert optimizer.step(samples()).status is Status.MOVED
    return model, optimizer


def assert_go_on_alike(
    first: tuple[nn.Module, KSD], second: tuple[nn.Module, KSD], steps: int = 2
) -> None:
    for _ in range(steps):
        results = [optimizer.step(samples()) for _, optimizer in (first, second)]
        assert results[0].status is Status.MOVED
        assert results[0].loss_after == results[1].loss_after
        assert torch.equal(theta(first[0]), theta(second[0]))
    assert first[1].steps == second[1].steps


# Saving and resuming ----------------------------------------------------------------------------


def in_memory(state: Any) -> Any:
    return copy.deepcopy(state)


def on_disk(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("transport", [in_memory, on_disk])
@pytest.mark.parametrize("build", [plain, grouped, of_the_paper])
def test_resuming_goes_on_bit_for_bit(
    build: Callable[[nn.Module], KSD], transport: Callable[[Any], Any]
) -> None:
    model, optimizer = trained(build)
    saved = transport({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh = network(seed=9)
    resumed = build(fresh)
    fresh.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_go_on_alike((model, optimizer), (fresh, resumed))


def test_the_state_is_what_checkpoint_tools_allow() -> None:
    model, optimizer = trained(grouped)
    assert set(optimizer.state) == set(model.parameters())
    for p, state in optimizer.state.items():
        assert list(state) == [PREVIOUS_STEP, f"{PREVIOUS_STEP}_2", f"{PREVIOUS_STEP}_3"]
        assert all(step.shape == p.shape for step in state.values())
        assert all(step.dtype == p.dtype for step in state.values())
    first, second = optimizer.state_dict()["param_groups"]
    assert (first["steps"], first["seed"]) == (2, 0)
    assert (second["lr"], first["weight_decay"]) == (0.9, 0.1)


# Torch says so itself where there is no process group; what is ours stays an error.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("build", [plain, grouped, of_the_paper])
@pytest.mark.parametrize("flat", [False, True])
def test_a_distributed_checkpoint_goes_on_bit_for_bit(
    build: Callable[[nn.Module], KSD], flat: bool, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def state_of(model: nn.Module, optimizer: KSD) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }

    model, optimizer = trained(build)
    state_dict_saver.save(state_of(model, optimizer), checkpoint_id=tmp_path)
    fresh = network(seed=9)
    resumed = build(fresh)
    unchanged = theta(fresh)
    state = state_of(fresh, resumed)  # calls step(closure=None) on the fresh optimiser
    assert torch.equal(theta(fresh), unchanged)
    state_dict_loader.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(fresh, state["model"])
    set_optimizer_state_dict(fresh, resumed, state["optimizer"], options=options)
    assert torch.equal(previous_step(resumed), previous_step(optimizer))
    assert_go_on_alike((model, optimizer), (fresh, resumed))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))]
)
@pytest.mark.parametrize("scheduled", [False, True])
def test_copies_and_pickles_of_model_and_optimizer_go_on_alike(
    duplicate: Callable[[Any], Any], scheduled: bool
) -> None:
    pair = trained(plain)
    if scheduled:  # a scheduler wraps `step`
        StepLR(pair[1], step_size=10)
    twins = duplicate(pair)
    assert twins[1].objective.network.model is twins[0]
    assert_go_on_alike(pair, twins)


def test_repr_names_class_and_groups() -> None:
    text = repr(grouped(network()))
    assert text.startswith("KSD (")
    assert "Parameter Group 1" in text
    assert "weight_decay: 0.1" in text


# step() without data ----------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"closure": None}, {"data": None}])
@pytest.mark.parametrize("zero_gradients", [False, True])
def test_an_empty_call_creates_the_state_and_changes_nothing(
    arguments: dict[str, None], zero_gradients: bool
) -> None:
    model = network()
    optimizer, before = plain(model), theta(model)
    if zero_gradients:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    assert optimizer.step(**arguments) is None
    assert set(optimizer.state) == set(model.parameters())
    assert all(not s[PREVIOUS_STEP].any() for s in optimizer.state.values())
    assert torch.equal(theta(model), before)
    assert optimizer.steps == 0
    # Zeros stand for "no previous step": the first step is as without the call.
    other = network()
    assert_go_on_alike((model, optimizer), (other, plain(other)))


def test_an_empty_call_keeps_the_state_of_a_trained_optimizer() -> None:
    _, optimizer = trained(plain)
    before = previous_step(optimizer)
    optimizer.step()
    assert torch.equal(previous_step(optimizer), before)
    assert optimizer.steps == 2


def test_gradients_or_a_closure_instead_of_data_are_refused() -> None:
    model = network()
    optimizer: Any = plain(model)
    x, y = samples()

    def closure() -> Any:
        return nn.MSELoss()(model(x), y)

    for arguments in ({"data": closure}, {"closure": closure}):
        with pytest.raises(TypeError, match=r"needs the data, and a closure.*optimizer.step\(data"):
            optimizer.step(**arguments)
    closure().backward()
    with pytest.raises(TypeError, match=r"call optimizer.step\(data\), without loss.backward"):
        optimizer.step()
    optimizer.zero_grad()
    assert optimizer.step(samples()).status is Status.MOVED


@pytest.mark.parametrize(("first", "then"), [("none", "tf32"), ("tf32", "ieee"), ("ieee", "tf32")])
def test_an_inherited_precision_goes_on_being_inherited(first: str, then: str) -> None:
    backends: Any = torch.backends  # whose annotations lack the setting
    before = backends.fp32_precision
    try:
        backends.fp32_precision = first
        plain(network()).step(samples())
        backends.fp32_precision = then
        assert backends.cuda.matmul.fp32_precision == then
    finally:
        backends.fp32_precision = before


def test_gradients_of_the_user_are_neither_read_nor_written() -> None:
    model, twin = network(), network()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    mine = [p.grad for p in model.parameters()]
    assert_go_on_alike((model, plain(model)), (twin, plain(twin)))
    for p, gradient in zip(model.parameters(), mine, strict=True):
        assert p.grad is gradient
        assert gradient is not None
        assert torch.equal(gradient, torch.full_like(p, 7.0))
    assert all(p.grad is None for p in twin.parameters())


# Learning rate ------------------------------------------------------------------------------------


def test_lr_scales_the_step_and_the_previous_step_is_the_one_taken() -> None:
    whole, half = network(), network()
    before = theta(whole)
    plain(whole).step(samples())
    optimizer = KSD(half, nn.MSELoss(), lr=0.5, **SETTINGS)
    result = optimizer.step(samples())
    taken = theta(half) - before
    torch.testing.assert_close(taken, 0.5 * (theta(whole) - before), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(previous_step(optimizer), taken, rtol=1e-4, atol=1e-7)
    assert result.status is Status.MOVED
    assert result.loss_after < result.loss_before


@pytest.mark.parametrize("lr", [1e-4, 0.5, 2.0])
def test_the_noise_does_not_depend_on_lr(lr: float) -> None:
    """Though it is measured along the previous step."""
    _, optimizer = trained(plain)
    _, other = trained(plain)
    for state in other.state.values():
        state["previous_step"] = lr * state["previous_step"]
    other.param_groups[0]["lr"] = lr
    noise, scaled = optimizer.step(samples()).noise, other.step(samples()).noise
    assert noise / 5 < scaled < 5 * noise


def test_lr_zero_changes_nothing() -> None:
    model, optimizer = trained(plain)
    before, d = theta(model), previous_step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    result = optimizer.step(samples())
    assert result.status is Status.NO_DECREASE
    assert "scaled by `lr`" in result.reason
    assert torch.equal(theta(model), before)
    assert torch.equal(previous_step(optimizer), d)


def test_lr_zero_changes_nothing_where_values_differ_with_autograd() -> None:
    """In eval mode and without autograd a transformer layer takes another kernel."""
    for seed in range(5):
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).eval()
        optimizer = KSD(model, nn.MSELoss(), dimension=2, lr=0.0, preconditioner="identity")
        result = optimizer.step((torch.randn(10, 3, 8), torch.randn(10, 3)))
        assert result.status is Status.NO_DECREASE


def test_a_scaled_step_that_is_no_decrease_is_refused() -> None:
    model, optimizer = trained(plain)
    before, d = theta(model), previous_step(optimizer)
    optimizer.param_groups[0]["lr"] = 50.0
    result = optimizer.step(samples())
    assert result.status is Status.NO_DECREASE
    assert result.loss_after == result.loss_before
    assert torch.equal(theta(model), before)
    assert torch.equal(previous_step(optimizer), d)
    optimizer.param_groups[0]["lr"] = 1.0
    assert optimizer.step(samples()).status is Status.MOVED


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.5),
        lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    ],
)
def test_schedulers_drive_the_learning_rate(schedule: Callable[[KSD], Any]) -> None:
    model, by_hand = network(), network()
    optimizer, reference = plain(model), plain(by_hand)
    scheduler = schedule(optimizer)
    for rate in (1.0, 0.5, 0.25):
        assert scheduler.get_last_lr() == [rate]
        reference.param_groups[0]["lr"] = rate
        assert optimizer.step(samples()).status is Status.MOVED
        reference.step(samples())
        scheduler.step()
        assert torch.equal(theta(model), theta(by_hand))
