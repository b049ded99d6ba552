"""The measured noise: against noise that was added, and against real rounding."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from krylov_descent.algorithms.noise import (
    NOISE_POINTS,
    noise_of_sum,
    noise_over_ranks,
    noise_steps,
    settled_noise,
)
from krylov_descent.runtime.ranks import Ranks

SAMPLES = 1000


def parabolas(points: int, seed: int = 0) -> Tensor:
    """Smooth values [points, SAMPLES] with a large constant, the size of a cross-entropy."""
    generator = torch.Generator().manual_seed(seed)
    coefficients = torch.randn(3, SAMPLES, generator=generator, dtype=torch.float64)
    t = torch.linspace(0, 1e-3, points, dtype=torch.float64)[:, None]
    return 56 + coefficients[0] + coefficients[1] * t + coefficients[2] * t**2


def estimates(points: int, independent: float, shared: float, repetitions: int = 200) -> Tensor:
    """Estimates for added normal noise, relative to its true standard deviation in the sum."""
    generator = torch.Generator().manual_seed(1)
    smooth = parabolas(points)
    found = []
    for _ in range(repetitions):
        own = torch.randn(points, SAMPLES, generator=generator, dtype=torch.float64)
        common = torch.randn(points, 1, generator=generator, dtype=torch.float64)
        found.append(noise_of_sum(smooth + independent * own + shared * common))
    truth = math.sqrt(SAMPLES * independent**2 + (SAMPLES * shared) ** 2)
    return torch.tensor(found) / truth


@pytest.mark.parametrize("points", [4, 5, 8])
def test_independent_noise_is_found(points: int) -> None:
    ratios = estimates(points, independent=1e-6, shared=0.0)
    assert ratios.min() > 0.9  # N samples: precise from below
    assert ratios.median() < 1.1
    within = (ratios < 1.5).double().mean()
    assert within > 0.8  # a normal number exceeds 1.5 in 13 cases out of 100


@pytest.mark.parametrize("points", [4, 5, 8])
def test_shared_noise_is_found_though_samples_alone_do_not_show_it(points: int) -> None:
    """Common to all samples, and in the sum ten times what they contribute independently."""
    ratios = estimates(points, independent=1e-6, shared=10e-6 / math.sqrt(SAMPLES))
    assert math.isclose(float(ratios.square().mean().sqrt()), 1.0, rel_tol=0.15)
    assert ratios.min() > 0.08  # never below the independent part
    assert (ratios > 0.3).double().mean() > 0.7


def test_more_points_sharpen_the_estimate_of_shared_noise() -> None:
    spread = [float(estimates(points, 1e-6, 1e-4).std()) for points in (4, 6, 12)]
    assert spread[0] > 1.3 * spread[1] > 1.3**2 * spread[2]


@pytest.mark.parametrize("points", [4, 5, 9])
def test_exact_parabolas_have_no_noise(points: int) -> None:
    t = torch.arange(points, dtype=torch.float64)[:, None]
    coefficients = torch.arange(1.0, 8.0, dtype=torch.float64)
    assert noise_of_sum(coefficients * t**2 - 3 * t + 56) == 0.0
    assert noise_of_sum(torch.full((points, 3), 0.1, dtype=torch.float64)) == 0.0


def test_four_points_follow_the_closed_form() -> None:
    values = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    # −v₀ + 3v₁ − 3v₂ + v₃ is 6 and −13; with the second sample turned round they add up.
    assert math.isclose(noise_of_sum(values), math.hypot(6, 13) / math.sqrt(20), rel_tol=1e-12)
    values[:, 1] *= -1
    assert math.isclose(noise_of_sum(values), (6 + 13) / math.sqrt(20), rel_tol=1e-12)


def test_one_sample_and_no_sample() -> None:
    values = torch.tensor([[0.0], [1.0], [0.0], [0.0]], dtype=torch.float64)
    assert math.isclose(noise_of_sum(values), 3 / math.sqrt(20), rel_tol=1e-12)
    assert noise_of_sum(torch.zeros(4, 0, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize("spacing", [1e-5, 1e-4, 1e-3])
def test_the_float32_rounding_of_a_net_is_measured(spacing: float) -> None:
    """Per-sample cross-entropies of an autoencoder, against the same in float64."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(100, 30), nn.Tanh(), nn.Linear(30, 100))
    images = torch.rand(SAMPLES, 100)
    exact_net, exact_images = copy.deepcopy(net).double(), images.double()
    weights = nn.utils.parameters_to_vector(exact_net.parameters()).detach()
    direction = torch.randn_like(weights)
    direction /= direction.norm()

    def losses(model: nn.Module, inputs: Tensor, point: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(point.to(inputs.dtype), model.parameters())
        with torch.no_grad():
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(inputs), inputs, reduction="none"
            )
        return loss.sum(dim=1).double()

    points = [weights + k * spacing * direction for k in range(48)]
    rounded = torch.stack([losses(net, images, point) for point in points])
    exact = torch.stack([losses(exact_net, exact_images, point) for point in points])
    truth = float((rounded - exact).sum(dim=1).std())

    found = torch.tensor([noise_of_sum(part) for part in rounded.split(4)])
    assert truth / 2 < float(found.square().mean().sqrt()) < truth * 2
    assert noise_of_sum(exact[:4]) < 1e-5 * truth


def test_bad_input_is_named() -> None:
    good = parabolas(4)
    with pytest.raises(ValueError, match="values must be finite"):
        noise_of_sum(good.index_fill(1, torch.tensor([3]), math.nan))
    with pytest.raises(ValueError, match="at least 4 points"):
        noise_of_sum(good[:3])
    with pytest.raises(ValueError, match="values must be a float64"):
        noise_of_sum(good.float())
    with pytest.raises(ValueError, match=r"\[points, samples\]"):
        noise_of_sum(good[:, 0])


def along(function: Callable[[Tensor], Tensor], rounding: float) -> Callable[[float], float]:
    """The noise of a function of one variable around 0, with rounding like that of float32."""
    generator = torch.Generator().manual_seed(3)

    def measure(part: float) -> float:
        points = part * torch.tensor(noise_steps(2.0**-23), dtype=torch.float64)
        values = function(points)[:, None].expand(-1, SAMPLES).clone()
        errors = torch.randn(values.shape, generator=generator, dtype=torch.float64)
        return noise_of_sum(values + rounding * errors) / SAMPLES

    return measure


@pytest.mark.parametrize(
    "function",
    [
        lambda t: 1 + (1e4 * t) ** 3,  # a step of ten thousand times the length of others
        lambda t: 1 + 1e3 * (t + 1e-5).abs(),  # a kink among the points
        lambda t: torch.where(t < -1e-6, torch.inf, 1 + t),  # infinite beyond a short way
    ],
)
def test_what_is_not_noise_is_measured_again_closer_in(
    function: Callable[[Tensor], Tensor],
) -> None:
    rounding = 1e-7
    measure = along(function, rounding)
    limit = 1e-4
    first = _or_infinite(measure, 1.0)
    found = settled_noise(lambda part: _or_infinite(measure, part), limit)
    assert first > 10 * limit
    assert rounding / math.sqrt(SAMPLES) / 3 < found < limit


def _or_infinite(measure: Callable[[float], float], part: float) -> float:
    try:
        return measure(part)
    except ValueError:  # a value is not finite
        return math.inf


def test_noise_that_stays_is_believed_however_large() -> None:
    """A loss that is the difference of large numbers has more noise than its size suggests."""
    found = settled_noise(along(lambda t: 1e-3 + t, 0.5), 1e-7)
    assert found == pytest.approx(0.5 / math.sqrt(SAMPLES), rel=0.5)


def test_what_never_settles_says_nothing() -> None:
    assert settled_noise(lambda part: 1e9 * part, 1e-7) == math.inf
    assert settled_noise(lambda part: math.nan, 1e-7) == math.inf
    assert settled_noise(lambda part: 1.0 if part == 1 else 0.0, 1e-7) == math.inf


def test_points_too_far_apart_say_nothing() -> None:
    """Between them the sum grows from 100 to 1e17, whose rounding is about 10."""
    ranks = Ranks(torch.device("cpu"))
    far = torch.tensor([1e2, 3e16, 6e16, 9e16], dtype=torch.float64)[:, None].repeat(1, 50)
    assert math.isnan(noise_over_ranks(list(far), NOISE_POINTS, ranks))
    close = parabolas(NOISE_POINTS)
    noisy = close + 1e-3 * torch.randn(close.shape, dtype=torch.float64)
    expected = pytest.approx(noise_of_sum(noisy))
    assert noise_over_ranks(list(noisy), NOISE_POINTS, ranks) == expected
    # A difference of large numbers may change by more than itself from rounding alone.
    around_zero = noisy - noisy.mean(1, keepdim=True)[:1]
    assert math.isfinite(noise_over_ranks(list(around_zero), NOISE_POINTS, ranks))
