"""The trial of `damped_directions.json`: damped Gauss-Newton directions, then KSD.

From the repository's root, with `src` and the root on PYTHONPATH:

    python results/trials/damped_directions.py wave --seconds 25 --device cuda
"""

import argparse
import math
import time

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.physics.levenberg_marquardt import FIRST, LevenbergMarquardt
from benchmarks.physics.objective import Terms, closure_of
from benchmarks.physics.running import _error
from krylov_descent import KSD
from krylov_descent.algorithms.bfgs import BFGS
from krylov_descent.laboratory.physics.equation import on_device
from krylov_descent.laboratory.physics.equations import EQUATIONS

# Dampings relative to the 1-norm of the matrix: the factor between two, the least, how many.
FACTOR, LEAST, COUNT = 4.0, 1e-15, 12
# Of each term's residuals, by which the directions are made; iterations of BFGS.
PART, ITERATIONS = 0.5, 5
# Smaller eigenvalues of the directions' Gram matrix are left out; the floor of the curvature.
DEPENDENT, FLOOR = 1e-13, 2e-14
# The phase ends when so many steps did not halve the loss, not before twice as many.
PATIENCE = 40


class DampedSteps(LevenbergMarquardt):
    """Steps in the span of (J_BᵀJ_B + λ)⁻¹J_Bᵀr_B for several λ, by BFGS on all residuals.

    Args:
        net: Linear layers and elementwise functions.
        terms: residuals without data.
    """

    def __init__(self, net: nn.Sequential, terms: Terms) -> None:
        super().__init__(net, terms)
        self._sizes = [term.batch.size for term in terms.values()]
        self._closure = closure_of(net, terms)

    def step(self) -> float:  # type: ignore[override]
        """Move to the best point of the subspace; returns the loss there."""
        self._linearize()
        with torch.no_grad():
            return self._step()

    def _step(self) -> float:
        jacobian, residuals = self._jacobian, self._residuals
        start, theta = float(residuals @ residuals) / 2, self._vector()
        dampings, directions = self._directions()
        v = torch.stack(directions)
        v /= v.norm(dim=1, keepdim=True)
        basis = _with_curvature_one(v, v @ jacobian.T)
        gradient = jacobian.T @ residuals
        search = BFGS(
            np.zeros(len(basis)),
            start,
            (basis @ gradient).cpu().numpy(),
            max_iterations=ITERATIONS,
            noise=1e-15 * start,
        )
        while search.result is None:
            self._move(theta + torch.from_numpy(search.point).to(v) @ basis)
            with torch.enable_grad():
                value = float(self._closure())
            slopes = torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None])
            search.tell(value, (basis @ slopes).cpu().numpy())
        best = search.result
        if not best.value < start:
            self._move(theta)
            damping = self._damping * FACTOR**2
            self._damping = damping if damping < 1e3 else FIRST
            return start
        step = torch.from_numpy(best.point).to(v) @ basis
        self._move(theta + step)
        self._damping = max(dampings[int((v @ step).argmax())], LEAST)
        return best.value

    def _directions(self) -> tuple[list[float], list[Tensor]]:
        """The dampings, and their directions [n]."""
        device, start = self._jacobian.device, 0
        rows = []
        for size in self._sizes:
            some = torch.randperm(size, device=device)[: max(1, int(PART * size))]
            rows.append(start + some)
            start += size
        part = torch.cat(rows)
        jacobian, residuals = self._jacobian[part], self._residuals[part]
        tall = jacobian.shape[1] <= jacobian.shape[0]
        matrix = jacobian.T @ jacobian if tall else jacobian @ jacobian.T
        right = jacobian.T @ residuals if tall else residuals
        scale = float(torch.linalg.matrix_norm(matrix, 1))
        dampings: list[float] = []
        directions: list[Tensor] = []
        for power in range(-(COUNT // 2), COUNT - COUNT // 2):
            damping = self._damping * FACTOR**power
            damped = matrix.clone()
            damped.diagonal().add_(damping * scale)
            factor, failed = torch.linalg.cholesky_ex(damped)
            if damping < LEAST / 10 or failed:
                continue
            solution = torch.cholesky_solve(right[:, None], factor)[:, 0]
            dampings.append(damping)
            directions.append(-(solution if tall else jacobian.T @ solution))
        return dampings, directions


def _with_curvature_one(v: Tensor, images: Tensor) -> Tensor:
    """Combinations of the rows of V in which JᵀJ is the identity, given VJᵀ."""
    gram, curvature = (v @ v.T).double().cpu(), (images @ images.T).double().cpu()
    values, vectors = torch.linalg.eigh(gram)
    kept = values > DEPENDENT * values[-1]
    orthonormal = vectors[:, kept] / values[kept].sqrt()
    values, vectors = torch.linalg.eigh(orthonormal.T @ curvature @ orthonormal)
    values = values.clamp(min=FLOOR * len(values) * float(values[-1]))
    found: Tensor = (orthonormal @ (vectors / values.sqrt())).T.to(v) @ v
    return found


def main() -> None:
    """Print seconds, kind, steps, loss and error."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("equation", choices=list(EQUATIONS))
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    equation, device = EQUATIONS[options.equation], torch.device(options.device)
    net = equation.make_net(options.seed).to(device)
    terms = on_device(equation.make_terms(), device)
    damped, losses, passed, shown = DampedSteps(net, terms), list[float](), 0.0, 1.0
    optimizer, steps = KSD(net, terms), 0
    stalled = False
    while passed < options.seconds:
        begun = time.perf_counter()
        loss = optimizer.step().loss_after if stalled else damped.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        passed, steps = passed + time.perf_counter() - begun, steps + 1
        if passed > min(shown, options.seconds):
            kind = "Krylov" if stalled else "damped"
            print(f"{passed:7.1f} s  {kind}  {steps:5}  {loss:.3g}  {_error(equation, net)}")
            shown = 1.3 * passed
        if not stalled:
            losses.append(loss)
            before = losses[-1 - PATIENCE] if steps >= 2 * PATIENCE else math.inf
            if loss > before / 2:
                stalled, steps = True, 0


if __name__ == "__main__":
    main()
