"""Dense float64 references for the problems of `tests.problems`, by torch.func.

Each is a derivative of a pure function of the flat vector θ, and shares no code with the library.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.loss_cases import Tree
from tests.problems import Problem


def point(problem: Problem) -> Tensor:
    """θ: the trained parameters as one vector [n]."""
    return torch.cat([p.detach().reshape(-1) for p in problem.trained.values()])


def outputs_at(problem: Problem, vector: Tensor) -> Tree:
    """The outputs as a pure function of θ."""
    shapes = {name: p.shape for name, p in problem.trained.items()}
    pieces = torch.split(vector, [shape.numel() for shape in shapes.values()])
    return problem.functional(
        {name: piece.view(shapes[name]) for name, piece in zip(shapes, pieces, strict=True)}
    )


def losses_at(problem: Problem, vector: Tensor) -> Tensor:
    """[N]: what each sample adds to the mean, times N."""
    numerators = problem.case.numerators(outputs_at(problem, vector))
    return numerators * len(numerators) / problem.case.normaliser


def _derivative(kind: Any, function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    found: Tensor = kind(function)(at)
    return found


def _reverse_twice(function: Callable[[Tensor], Tensor]) -> Any:
    return torch.func.jacrev(torch.func.grad(function))


def value(problem: Problem) -> float:
    """f(θ)."""
    return float(losses_at(problem, point(problem)).mean())


def gradient(problem: Problem) -> Tensor:
    """∂f/∂θ [n]."""
    return _derivative(torch.func.grad, lambda v: losses_at(problem, v).mean(), point(problem))


def hessian(problem: Problem) -> Tensor:
    """∂²f/∂θ² [n, n]."""
    return _derivative(_reverse_twice, lambda v: losses_at(problem, v).mean(), point(problem))


def per_sample_gradients(problem: Problem) -> Tensor:
    """gᵢ as rows [N, n]."""
    return _derivative(torch.func.jacrev, lambda v: losses_at(problem, v), point(problem))


def squares(problem: Problem) -> Tensor:
    """The Fisher diagonal: mean of gᵢ² [n]."""
    return per_sample_gradients(problem).square().mean(0)


def fisher(problem: Problem) -> Tensor:
    """Mean of gᵢgᵢᵀ [n, n]."""
    rows = per_sample_gradients(problem)
    return rows.T @ rows / len(rows)


def jacobian(problem: Problem) -> Tensor:
    """∂outputs/∂θ [numbers in the outputs, n]."""

    def flat(vector: Tensor) -> Tensor:
        return torch.cat([z.reshape(-1) for z in tree_leaves(outputs_at(problem, vector))])

    return _derivative(torch.func.jacrev, flat, point(problem))


def output_hessian(problem: Problem) -> Tensor:
    """∂²f/∂outputs² [m, m], for the numbers in the outputs."""
    outputs = outputs_at(problem, point(problem))
    leaves = tree_leaves(outputs)

    def mean_loss(flat: Tensor) -> Tensor:
        parts = iter(torch.split(flat, [z.numel() for z in leaves]))
        rebuilt = tree_map(lambda z: next(parts).view(z.shape), outputs)
        return problem.case.numerators(rebuilt).sum() / problem.case.normaliser

    flat = torch.cat([z.reshape(-1) for z in leaves])
    return _derivative(_reverse_twice, mean_loss, flat)


def gauss_newton(problem: Problem) -> Tensor:
    """JᵀH_E J [n, n]."""
    J = jacobian(problem)
    return J.T @ output_hessian(problem) @ J
