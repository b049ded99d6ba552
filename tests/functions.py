"""Functions with their gradients, and SciPy and ourselves to minimise them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from krylov_descent.algorithms import minimizer
from krylov_descent.algorithms.bfgs import BFGS, BFGSResult, StopReason, Vector
from krylov_descent.algorithms.line_search import LineSearchResult, Trial, WolfeSearch

ArrayFunction = Callable[[Vector], tuple[float, Vector]]
Function = Callable[[Tensor], tuple[float, Tensor]]
Problem = tuple[Function, Tensor]


@dataclass(frozen=True)
class Found:
    """What BFGS found, as tensors, with all evaluations."""

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
    """BFGS on a function of tensors, whose value and gradient at the start may be known."""

    def of_arrays(point: Vector) -> tuple[float, Vector]:
        value, gradient = function(torch.from_numpy(point))
        return value, gradient.numpy()

    value, gradient = function(start) if initial is None else initial
    found = minimizer.minimize(BFGS(start.numpy(), value, gradient.numpy(), **options), of_arrays)
    return Found(
        torch.from_numpy(found.point),
        found.value,
        torch.from_numpy(found.gradient),
        found.iterations,
        found.evaluations + (initial is None),
        found.reason,
    )


def minimize_arrays(function: ArrayFunction, start: Vector, **options: Any) -> BFGSResult:
    """BFGS on a function of arrays."""
    return minimizer.minimize(BFGS(start, *function(start), **options), function)


def wolfe_search(
    trial_at: Callable[[float], Trial], start: Trial, **options: Any
) -> LineSearchResult:
    """The line search on a function of the step."""
    search = WolfeSearch(start, **options)
    while search.result is None:
        search.tell(trial_at(search.step))
    return search.result


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
