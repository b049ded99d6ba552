"""Levenberg and Marquardt's method with a dense Jacobian.

The loss is ½‖r‖² with r the residuals of all terms times roots of their weights. A step solves
(JᵀJ + λ)d = -Jᵀr, or the equal system with JJᵀ where there are fewer residuals than parameters. The
damping λ is searched for around that of the last step: the loss at θ + d(λ) decides.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.physics.objective import Terms, loss_of, recorded

# The damping relative to the 1-norm of the matrix: at first, the factor between two trials, and the
# range.
FIRST, FACTOR, LEAST, MOST = 1e-3, 3.0, 1e-15, 1e3


class SampleWeights:
    """A net of Linear layers and elementwise functions with weights of its own for each sample.

    The gradient of the sum of all samples' residuals by these weights is the Jacobian.

    Args:
        net: whose current weights are copied.
        samples: N.
    """

    def __init__(self, net: nn.Sequential, samples: int) -> None:
        self._layers = list(net)
        self.weights: list[Tensor] = []
        for p in net.parameters():
            shape = p.shape if p.dim() == 2 else (1, *p.shape)
            copies = p.detach().expand(samples, *shape).contiguous()
            self.weights.append(copies.requires_grad_())

    def __call__(self, points: Tensor) -> Tensor:
        """The outputs [N, q] for the points [N, d]."""
        h, weights = points.unsqueeze(1), iter(self.weights)
        for layer in self._layers:
            if isinstance(layer, nn.Linear):
                weight = next(weights).transpose(1, 2)
                h = torch.baddbmm(next(weights), h, weight)
            else:
                h = layer(h)
        return h.squeeze(1)


def jacobian_of(net: nn.Sequential, terms: Terms) -> tuple[Tensor, Tensor]:
    """J [rows, n] and r [rows], with a row for each residual at each point of each term."""
    rows: list[Tensor] = []
    residuals: list[Tensor] = []
    for term in terms.values():
        batch = term.batch
        copies = SampleWeights(net, batch.size)
        found = term.outputs(copies, batch.inputs).reshape(batch.size, -1)
        root = math.sqrt(2 * term.weight / found.numel())
        for column in found.unbind(1):
            gradients = torch.autograd.grad(
                column.sum(), copies.weights, retain_graph=True, materialize_grads=True
            )
            rows.append(root * torch.cat([g.flatten(1) for g in gradients], 1))
            residuals.append(root * column.detach())
    return torch.cat(rows), torch.cat(residuals)


class LevenbergMarquardt:
    """The method at its start.

    Args:
        net: Linear layers and elementwise functions.
        terms: residuals without data.
    """

    def __init__(self, net: nn.Sequential, terms: Terms) -> None:
        self._parameters = list(net.parameters())
        self._jacobian, self._residuals = (found.clone() for found in jacobian_of(net, terms))
        self._loss = self._residuals.new_empty(())

        def linearize() -> None:
            jacobian, residuals = jacobian_of(net, terms)
            self._jacobian.copy_(jacobian)
            self._residuals.copy_(residuals)

        def evaluate() -> None:
            self._loss.copy_(loss_of(net, terms).detach())

        device = self._loss.device
        self._linearize: Callable[[], None] = recorded(linearize, device)
        self._evaluate: Callable[[], None] = recorded(evaluate, device)
        self._damping = FIRST

    @torch.no_grad()
    def step(self) -> None:
        """Move to the best point that was tried, if it is better."""
        with torch.enable_grad():
            self._linearize()
        jacobian, residuals = self._jacobian, self._residuals
        tall = jacobian.shape[1] <= jacobian.shape[0]
        matrix = jacobian.T @ jacobian if tall else jacobian @ jacobian.T
        right = jacobian.T @ residuals if tall else residuals
        scale = float(torch.linalg.matrix_norm(matrix, 1))
        theta, start = self._vector(), float(residuals @ residuals) / 2
        tried: dict[float, tuple[float, Tensor]] = {}

        def loss_at(damping: float) -> float:
            if damping not in tried:
                damped = matrix.clone()
                damped.diagonal().add_(damping * scale)
                factor, failed = torch.linalg.cholesky_ex(damped)
                solution = torch.cholesky_solve(right[:, None], factor)[:, 0]
                point = theta - (solution if tall else jacobian.T @ solution)
                value = math.inf if failed else self._value(point)
                tried[damping] = (value if math.isfinite(value) else math.inf, point)
            return tried[damping][0]

        damping = self._damping
        if loss_at(damping / FACTOR) < loss_at(damping):
            damping /= FACTOR
            while damping > LEAST and loss_at(damping / FACTOR) < loss_at(damping):
                damping /= FACTOR
        else:
            while damping < MOST and (
                not loss_at(damping) < start or loss_at(damping * FACTOR) < loss_at(damping)
            ):
                damping *= FACTOR
        better = loss_at(damping) < start
        self._move(tried[damping][1] if better else theta)
        self._damping = damping if better else FIRST

    def _vector(self) -> Tensor:
        return torch.cat([p.flatten() for p in self._parameters])

    def _move(self, theta: Tensor) -> None:
        start = 0
        for p in self._parameters:
            p.copy_(theta[start : start + p.numel()].view_as(p))
            start += p.numel()

    def _value(self, theta: Tensor) -> float:
        self._move(theta)
        with torch.enable_grad():
            self._evaluate()
        return float(self._loss)
