"""Dense BFGS on values that carry noise: it goes on to the noise, and stops there."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from krylov_descent.algorithms.bfgs import StopReason
from krylov_descent.algorithms.noise import noise_of_sum
from tests.functions import Function, differentiable, minimize, quadratic, scipy_bfgs, spread


class FlooredObjective:
    """Cross-entropies with soft targets, near 56 nats, over 20 whitened coordinates of a net.

    This is the inner problem of KSD: the curvature comes from other samples than the objective,
    and the per-sample losses and the gradient are rounded to the precision of the net.
    """

    INPUTS, HIDDEN, OUTPUTS, COORDINATES = 10, 16, 100, 20

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.x = random(600, self.INPUTS)
        self.y = torch.sigmoid((self.x @ random(self.INPUTS, self.OUTPUTS)).sin() - 1.5)
        weights = 0.3 * random((self.INPUTS + 1) * self.HIDDEN + self.HIDDEN * self.OUTPUTS)
        self.theta = torch.cat([weights, torch.full((self.OUTPUTS,), -1.5, dtype=torch.float64)])

        # The gradient, so that there is something to gain, and random directions.
        _, gradient = differentiable(lambda theta: self._losses(theta).mean())(self.theta)
        directions = [gradient[:, None], random(len(self.theta), self.COORDINATES - 1)]
        self.basis, _ = torch.linalg.qr(torch.cat(directions, dim=1))
        self.basis = torch.linalg.solve_triangular(
            torch.linalg.cholesky(self._projected_gauss_newton()), self.basis.T, upper=False
        ).T

    def losses(self, a: Tensor, dtype: torch.dtype) -> Tensor:
        """Per-sample losses on the second half of the samples, computed in the precision dtype."""
        return self._losses((self.theta + self.basis @ a).to(dtype))

    def function(self, dtype: torch.dtype) -> Function:
        return differentiable(lambda a: self.losses(a, dtype).double().mean())

    def measured_noise(self, dtype: torch.dtype) -> float:
        origin = torch.zeros(self.COORDINATES, dtype=torch.float64)
        _, gradient = self.function(dtype)(origin)
        steps = 1e-3 * torch.arange(8) / gradient.norm()
        values = torch.stack([self.losses(-step * gradient, dtype).double() for step in steps])
        return noise_of_sum(values) / values.shape[1]

    def _logits(self, theta: Tensor, x: Tensor) -> Tensor:
        first, second, bias = theta.split(
            [(self.INPUTS + 1) * self.HIDDEN, self.HIDDEN * self.OUTPUTS, self.OUTPUTS]
        )
        first, second = first.view(-1, self.HIDDEN), second.view(-1, self.OUTPUTS)
        hidden = torch.tanh(x.to(theta) @ first[:-1] + first[-1])
        return torch.addmm(bias, hidden, second)

    def _losses(self, theta: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            self._logits(theta, self.x[300:]), self.y[300:].to(theta), reduction="none"
        ).sum(dim=1)

    def _projected_gauss_newton(self) -> Tensor:
        """On the first half of the samples."""
        x = self.x[:300]
        columns = [
            torch.autograd.functional.jvp(lambda t: self._logits(t, x), self.theta, v)[1]
            for v in self.basis.T
        ]
        jacobian = torch.stack(columns)  # [coordinates, samples, outputs]
        p = torch.sigmoid(self._logits(self.theta, x))
        weighted = jacobian * (p * (1 - p) / len(x))
        return weighted.flatten(1) @ jacobian.flatten(1).T


def test_goes_on_to_the_noise_of_float32_above_a_large_floor() -> None:
    objective = FlooredObjective()
    start = torch.zeros(objective.COORDINATES, dtype=torch.float64)
    rounded, exact = objective.function(torch.float32), objective.function(torch.float64)
    noise = objective.measured_noise(torch.float32)

    found = minimize(rounded, start, initial=rounded(start), noise=noise)

    _, optimum = scipy_bfgs(exact, found.point)
    assert 50 < optimum < 60
    assert noise < 1e-8 * optimum  # else the floor would not hide anything
    assert exact(start)[0] - optimum > 1e6 * noise
    assert exact(found.point)[0] - optimum < 3 * noise
    assert found.reason is StopReason.BELOW_NOISE
    assert found.evaluations <= 1.5 * found.iterations


@pytest.mark.parametrize("misjudged", [0.1, 10.0])
def test_a_noise_misjudged_tenfold_does_little_harm(misjudged: float) -> None:
    objective = FlooredObjective()
    start = torch.zeros(objective.COORDINATES, dtype=torch.float64)
    rounded, exact = objective.function(torch.float32), objective.function(torch.float64)
    noise = objective.measured_noise(torch.float32)

    well = minimize(rounded, start, noise=noise)
    found = minimize(rounded, start, noise=misjudged * noise)

    _, optimum = scipy_bfgs(exact, found.point)
    assert exact(found.point)[0] - optimum < 3 * noise * max(1.0, misjudged)
    assert found.evaluations <= well.evaluations + 15


@pytest.mark.parametrize("seed", range(10))
def test_the_search_ends_when_the_prediction_is_below_the_noise(seed: int) -> None:
    noise = 1e-5
    clean, start = quadratic(spread(-0.5, 0.5), seed)
    generator = np.random.default_rng(seed)

    def function(point: Tensor) -> tuple[float, Tensor]:
        value, gradient = clean(point)
        return 56 + value + noise * generator.normal(), gradient

    found = minimize(function, start, noise=noise)
    assert found.reason is StopReason.BELOW_NOISE
    assert clean(found.point)[0] < 20 * noise  # out of 10 at the start
    assert found.evaluations <= 1.5 * found.iterations + 1
