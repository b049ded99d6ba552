"""CD-1 against the formulas written out in NumPy float64, and what pretraining is for."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from krylov_descent.laboratory.initialization import initialize
from krylov_descent.laboratory.models import autoencoder, classifier
from krylov_descent.laboratory.problems.curves import draw_curves
from krylov_descent.laboratory.problems.problem import squared_error
from krylov_descent.laboratory.rbm import (
    PretrainingEpoch,
    Rbm,
    RbmSettings,
    pretrain_autoencoder,
    pretrain_classifier,
    train_rbm,
)

Array = npt.NDArray[np.float64]
SETTINGS = RbmSettings()


def tiny_rbm(linear: bool) -> Rbm:
    generator = torch.Generator().manual_seed(0)
    return Rbm(4, 3, linear=linear, settings=SETTINGS, generator=generator, dtype=torch.float64)


def logistic(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize("linear", [False, True])
def test_two_updates_are_the_closed_form_with_momentum(linear: bool) -> None:
    """Sums over samples and units, one at a time, as the algorithm is written."""
    rbm = tiny_rbm(linear)
    W, b, c = rbm.weight.numpy().copy(), np.zeros(4), np.zeros(3)
    vW, vb, vc = np.zeros((4, 3)), np.zeros(4), np.zeros(3)
    rate = 0.001 if linear else 0.1
    up = (lambda x: x) if linear else logistic
    for momentum in (0.5, 0.9):
        batch = np.random.default_rng(1).random((5, 4))
        noise = rbm.draw_noise(5)
        gW, gb, gc, error = np.zeros((4, 3)), np.zeros(4), np.zeros(3), 0.0
        for v, u in zip(batch, noise.numpy(), strict=True):
            h = up(v @ W + c)
            s = h + u if linear else (h > u).astype(float)
            v1 = logistic(W @ s + b)
            h1 = up(v1 @ W + c)
            gW += (np.outer(v, h) - np.outer(v1, h1)) / 5
            gb += (v - v1) / 5
            gc += (h - h1) / 5
            error += ((v - v1) ** 2).sum()
        vW = momentum * vW + rate * (gW - 2e-4 * W)
        vb = momentum * vb + rate * gb
        vc = momentum * vc + rate * gc
        W, b, c = W + vW, b + vb, c + vc
        found = rbm.update(torch.from_numpy(batch), noise, momentum)
        np.testing.assert_allclose(rbm.weight, W, rtol=1e-12)
        np.testing.assert_allclose(rbm.visible_bias, b, rtol=1e-12)
        np.testing.assert_allclose(rbm.hidden_bias, c, rtol=1e-12)
        assert found.item() == pytest.approx(error, rel=1e-12)


def test_noise_is_uniform_for_binary_and_normal_for_linear_units() -> None:
    binary, linear = tiny_rbm(False).draw_noise(5_000), tiny_rbm(True).draw_noise(5_000)
    assert 0 <= binary.min() < 0.01
    assert 0.99 < binary.max() < 1
    assert linear.mean().item() == pytest.approx(0, abs=0.05)
    assert linear.std().item() == pytest.approx(1, abs=0.05)


def test_momentum_changes_after_five_epochs_and_the_last_batch_may_be_smaller() -> None:
    seen: list[tuple[int, float]] = []

    class Watched(Rbm):
        def update(self, batch: torch.Tensor, noise: torch.Tensor, momentum: float) -> torch.Tensor:
            seen.append((len(batch), momentum))
            return super().update(batch, noise, momentum)

    settings = RbmSettings(epochs=7, batch_size=4)
    rbm = Watched(6, 2, linear=False, settings=settings, generator=torch.Generator())
    train_rbm(torch.rand(10, 6), rbm, lambda epoch, error: None)
    assert seen == [(size, m) for m in [0.5] * 5 + [0.9] * 2 for size in (4, 4, 2)]


def test_the_reconstruction_error_falls() -> None:
    errors: list[float] = []
    settings = RbmSettings(epochs=8)
    generator = torch.Generator().manual_seed(0)
    rbm = Rbm(784, 50, linear=False, settings=settings, generator=generator)
    data = draw_curves(1_000, seed=0)
    train_rbm(data, rbm, lambda _, error: errors.append(error))
    assert errors[-1] < 0.6 * errors[0]
    # Better than the best constant answer, which knows nothing of the image.
    assert errors[-1] < (data - data.mean(0)).square().sum(1).mean()


def test_the_unrolled_autoencoder_has_the_weights_both_ways_and_reconstructs() -> None:
    model, random = autoencoder((784, 60, 20)), autoencoder((784, 60, 20))
    data = draw_curves(1_500, seed=0)
    seen: list[PretrainingEpoch] = []
    settings = RbmSettings(epochs=20)
    pretrain_autoencoder(model, data, seed=0, settings=settings, report=seen.append)
    maps = [module for module in model if isinstance(module, nn.Linear)]
    assert torch.equal(maps[0].weight, maps[3].weight.T)
    assert torch.equal(maps[1].weight, maps[2].weight.T)
    assert [(e.layer, e.layers, e.epoch, e.epochs) for e in seen] == [
        (layer, 2, epoch, 20) for layer in (1, 2) for epoch in range(1, 21)
    ]
    initialize(random, "sparse", seed=0)
    fresh = draw_curves(500, seed=0, stream=1)
    with torch.no_grad():
        pretrained = squared_error(model(fresh), fresh).mean()
        untrained = squared_error(random(fresh), fresh).mean()
    assert pretrained < 0.2 * untrained
    # The best answer that ignores the image is the mean image.
    assert pretrained < 0.85 * (fresh - data.mean(0)).square().sum(1).mean()


def test_one_layer_unrolled_is_the_rbms_own_mean_field_pass() -> None:
    """Catches a transposed weight or a bias on the wrong side."""
    data = torch.rand(30, 5, dtype=torch.float64)
    settings = RbmSettings(epochs=3, batch_size=10)
    model = autoencoder((5, 4), code="logistic", dtype=torch.float64)
    pretrain_autoencoder(model, data, seed=7, settings=settings)
    generator = torch.Generator().manual_seed(7)
    rbm = Rbm(5, 4, linear=False, settings=settings, generator=generator, dtype=torch.float64)
    train_rbm(data, rbm, lambda epoch, error: None)
    expected = rbm.visible_mean(rbm.hidden_mean(data))
    torch.testing.assert_close(torch.sigmoid(model(data)), expected)


def test_the_classifiers_hidden_layers_are_pretrained_and_its_top_is_small() -> None:
    data = draw_curves(300, seed=0)
    model = classifier((784, 30, 20, 10))
    pretrain_classifier(model, data, seed=0, settings=RbmSettings(epochs=1))
    top = model[-1]
    assert isinstance(top, nn.Linear)
    assert top.weight.std().item() == pytest.approx(0.1, rel=0.15)
    assert top.bias.eq(0).all()
    bottom = model[0]
    assert isinstance(bottom, nn.Linear)
    assert bottom.bias.ne(0).all()


def test_the_seed_decides_and_the_global_state_does_not() -> None:
    data = draw_curves(200, seed=0)
    models = [autoencoder((784, 10, 3)) for _ in range(3)]
    before = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        pretrain_autoencoder(model, data, seed=seed, settings=RbmSettings(epochs=2))
    assert torch.equal(torch.get_rng_state(), before)
    first, second, other = (torch.cat([p.flatten() for p in m.parameters()]) for m in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_divergence_is_an_error_that_says_what_to_do() -> None:
    settings = RbmSettings(epochs=3, linear_learning_rate=1e30)
    rbm = Rbm(20, 5, linear=True, settings=settings, generator=torch.Generator())
    with pytest.raises(FloatingPointError, match="linear_learning_rate"):
        train_rbm(torch.rand(200, 20), rbm, lambda epoch, error: None)


@pytest.mark.parametrize("field", ["epochs", "batch_size"])
def test_settings_check_their_ranges(field: str) -> None:
    with pytest.raises(ValueError, match=f"`{field}`"):
        dataclasses.replace(SETTINGS, **{field: 0})


@pytest.mark.gpu
def test_it_runs_on_the_device_of_the_data() -> None:
    data = draw_curves(300, seed=0).to("cuda")
    model = autoencoder((784, 30, 5), device="cuda")
    seen: list[PretrainingEpoch] = []
    pretrain_autoencoder(model, data, 0, settings=RbmSettings(epochs=3), report=seen.append)
    assert seen[2].error < seen[0].error
