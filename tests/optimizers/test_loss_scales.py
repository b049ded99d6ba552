"""A loss times 1e-24 or 1e20, in float64 times 1e±200, is trained as the loss itself."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from krylov_descent import (
    KSD,
    LBFGS,
    FirstOrder,
    HessianFree,
    KroneckerFactors,
    NonlinearCG,
    Status,
)
from tests.optimizers.nets import classes, net, parameters_of, through_a_file

FINE = partial(KSD, dimension=4)
OPTIMIZERS: dict[str, Any] = {
    "fisher-diagonal": FINE,
    "identity": partial(FINE, preconditioner="identity"),
    "identity with decay": partial(FINE, preconditioner="identity"),
    "hessian": partial(FINE, curvature="hessian"),
    "NonlinearCG": partial(NonlinearCG, iterations=4),
    "LBFGS": partial(LBFGS, iterations=4),
}
# Powers of two, which change no digit, close to those of ten.
POWERS = {torch.float32: (-80, 66), torch.float64: (-664, 664)}
CASES = [(dtype, power) for dtype, powers in POWERS.items() for power in powers]


class Scaled(nn.Module):
    """Cross-entropy times a number, for each sample."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.scale * nn.functional.cross_entropy(outputs, targets, reduction="none")


def trained(make: Any, scale: float, dtype: torch.dtype, steps: int = 2) -> tuple[Any, Any]:
    """The optimiser after some steps on the scaled loss, and their results."""
    optimizer = make(net(dtype), Scaled(scale))
    return optimizer, [optimizer.step(classes(dtype=dtype)) for _ in range(steps)]


def parameters(optimizer: Any) -> Tensor:
    return parameters_of(optimizer.objective.network.model)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "power"), CASES)
def test_steps_are_those_of_the_loss_itself(name: str, dtype: torch.dtype, power: int) -> None:
    make, scale = OPTIMIZERS[name], 2.0**power
    decay = 0.01 if "decay" in name else 0.0
    plain, expected = trained(partial(make, weight_decay=decay), 1.0, dtype)
    scaled, found = trained(partial(make, weight_decay=decay * scale), scale, dtype)
    assert torch.equal(parameters(scaled), parameters(plain))
    for a, b in zip(found, expected, strict=True):
        assert (a.status, a.reason, a.rank) == (b.status, b.reason, b.rank)
        assert (a.iterations, a.evaluations, a.products) == (
            b.iterations,
            b.evaluations,
            b.products,
        )
        for key in ("loss", "loss_before", "loss_after", "noise", "gradient_norm"):
            assert getattr(a, key) / scale == pytest.approx(getattr(b, key), rel=1e-6)
        assert a.step_norm == b.step_norm
        assert [value / scale for value in a.ritz_values] == pytest.approx(b.ritz_values)
    # Outside of a step the loss is what it is.
    data = classes(dtype=dtype)
    assert scaled.objective.value(data) / scale == plain.objective.value(data)


@pytest.mark.parametrize(("dtype", "power"), CASES)
def test_kronecker_factors_of_a_scaled_loss(dtype: torch.dtype, power: int) -> None:
    make = partial(FINE, preconditioner=KroneckerFactors(after=0))
    (_, expected), (_, found) = (trained(make, s, dtype) for s in (1.0, 2.0**power))
    for a, b in zip(found, expected, strict=True):
        assert a.loss_after / 2.0**power == pytest.approx(b.loss_after, rel=1e-2)


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e-24),
        (torch.float32, 1e20),
        (torch.float64, 1e-200),
        (torch.float64, 1e200),
    ],
)
def test_no_optimiser_takes_a_large_or_small_gradient_for_none(
    dtype: torch.dtype, scale: float
) -> None:
    for make in (FINE, *(OPTIMIZERS[name] for name in ("NonlinearCG", "LBFGS"))):
        _, (first, *_, last) = trained(make, scale, dtype)
        assert last.status is Status.MOVED
        assert last.loss_after < 0.9 * first.loss
    # Levenberg and Marquardt's λ, and a learning rate, are numbers in units of the loss.
    tuned = partial(HessianFree, damping=45.0 * scale)
    (_, expected), (_, found) = (
        trained(make, s, dtype) for make, s in ((HessianFree, 1.0), (tuned, scale))
    )
    assert found[-1].status is Status.MOVED
    assert found[-1].loss_after / scale == pytest.approx(expected[-1].loss_after, rel=1e-2)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 1e-24), (torch.float64, 1e-200)])
def test_steps_that_are_too_short_are_told_as_such(dtype: torch.dtype, scale: float) -> None:
    for make, message in (
        (HessianFree, "`damping` of the size of the loss's curvature"),
        (FirstOrder, "too small to change the parameters: scale the loss, or `lr`"),
    ):
        _, (result,) = trained(make, scale, dtype, 1)
        assert result.status is Status.NO_DECREASE
        assert message in result.reason


def test_a_stream_is_scaled_at_the_next_step() -> None:
    """It cannot be walked over again, and its squares are infinite."""
    model, (inputs, targets) = net(), classes()
    optimizer = KSD(model, Scaled(1e20), dimension=4)
    before = parameters_of(model)
    result = optimizer.step(iter([(inputs, targets)]))
    assert result.status is Status.NOT_FINITE
    assert "`data` is a stream" in result.reason
    assert 1e20 < result.loss < 2e20
    assert 1e19 < result.gradient_norm < 1e20
    assert torch.equal(parameters_of(model), before)
    assert optimizer.step(iter([(inputs, targets)])).status is Status.MOVED


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resumed_run_finds_the_scale_again(name: str, tmp_path: Any) -> None:
    make, data = OPTIMIZERS[name], classes()
    optimizer, _ = trained(make, 2.0**-80, torch.float32, 2)
    model = net()
    model.load_state_dict(optimizer.objective.network.model.state_dict())
    resumed = make(model, Scaled(2.0**-80))
    resumed.load_state_dict(through_a_file(optimizer.state_dict(), tmp_path / "state"))
    for _ in range(2):
        assert resumed.step(data).loss_after == optimizer.step(data).loss_after
    assert torch.equal(parameters_of(model), parameters(optimizer))


def test_a_loss_that_changes_its_size_in_mid_training() -> None:
    """As it does where targets are in other units from now on."""
    optimizer, _ = trained(FINE, 1.0, torch.float32, 1)
    loss = optimizer.objective.network.loss.module
    for scale in (1e-24, 1e20, 1.0):
        loss.scale = scale
        result = optimizer.step(classes())
        assert result.status is Status.MOVED
        assert 0.1 * scale < result.loss < scale


def test_layers_are_compared_at_any_scale() -> None:
    """A weight that is used twice must not be trusted because all norms are infinite, or zero."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()

        def forward(self, x: Tensor) -> Tensor:
            weight, *_ = self.layers.parameters()
            outputs: Tensor = self.layers(x) + nn.functional.linear(x, weight)[:, :3]
            return outputs

    inputs, targets = classes()
    for scale in (1e-24, 1.0, 1e20):
        model = Twice()
        optimizer = KSD(model, Scaled(scale), dimension=4)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        exact = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        result = optimizer.step((inputs, targets))
        assert result.gradient_norm / scale == pytest.approx(float(exact.norm()), rel=1e-4)
