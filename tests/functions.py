"""Smooth functions with their gradients, and SciPy to minimise them."""

from collections.abc import Callable

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from krylov_descent.bfgs import Function

Problem = tuple[Function, Tensor]


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
