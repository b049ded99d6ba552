"""Smooth functions with their gradients in torch, and SciPy and ourselves to minimise them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from krylov_descent.algorithms.bfgs import StopReason, Vector, minimize_bfgs

Function = Callable[[Tensor], tuple[float, Tensor]]
Problem = tuple[Function, Tensor]


@dataclass(frozen=True)
class Found:
    """What `minimize_bfgs` found, as tensors."""

    point: Tensor
    value: float
    gradient: Tensor
    iterations: int
    evaluations: int
    reason: StopReason


def minimize(
    function: Function,
    start: Tensor,
    *,
    initial: tuple[float, Tensor] | None = None,
    **options: Any,
) -> Found:
    """`minimize_bfgs` of a function of tensors."""

    def of_arrays(point: Vector) -> tuple[float, Vector]:
        value, gradient = function(torch.from_numpy(point))
        return value, gradient.numpy()

    known = None if initial is None else (initial[0], initial[1].numpy())
    found = minimize_bfgs(of_arrays, start.numpy(), initial=known, **options)
    return Found(
        torch.from_numpy(found.point),
        found.value,
        torch.from_numpy(found.gradient),
        found.iterations,
        found.evaluations,
        found.reason,
    )


def differentiable(formula: Callable[[Tensor], Tensor]) -> Function:
    """Value and gradient of a formula by autograd."""

    def function(point: Tensor) -> tuple[float, Tensor]:
        point = point.detach().requires_grad_()
        value = formula(point)
        (gradient,) = torch.autograd.grad(value, point)
        return float(value.detach()), gradient

    return function


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scipy_bfgs(function: Function, start: Tensor) -> tuple[Tensor, float]:
    def numpy_function(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = function(torch.from_numpy(point.copy()))
        return value, gradient.numpy()

    options = {"gtol": 1e-12, "maxiter": 2000}
    found = scipy.optimize.minimize(
        numpy_function, start.numpy(), jac=True, method="BFGS", options=options
    )
    return torch.from_numpy(found.x), float(found.fun)


def quadratic(eigenvalues: Tensor, seed: int) -> Problem:
    size = len(eigenvalues)
    rotation, _ = torch.linalg.qr(normal(size, size, seed=seed))
    hessian = rotation @ torch.diag(eigenvalues) @ rotation.T
    minimum = normal(size, seed=seed + 1)

    def function(point: Tensor) -> tuple[float, Tensor]:
        gradient = hessian @ (point - minimum)
        return 0.5 * float((point - minimum) @ gradient), gradient

    return function, torch.zeros(size, dtype=torch.float64)


def spread(low: float, high: float, size: int = 20) -> Tensor:
    return torch.logspace(low, high, size, dtype=torch.float64)
