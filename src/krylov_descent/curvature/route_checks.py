"""Checks on a few samples that a route of differentiation gives the whole curvature of a model.

`derivative_checks` has the comparisons. This module picks the comparisons that each route needs.
They run once for a model. An error means that the route cannot be used.
"""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from krylov_descent.curvature import finite_differences, forward_mode
from krylov_descent.curvature.derivative_checks import (
    check_along,
    check_differences,
    check_double_backward,
    check_symmetric,
    foreign_operations,
)
from krylov_descent.curvature.double_backward import losses_of, outputs_of
from krylov_descent.curvature.finite_differences import central_difference, gradients, relative_step
from krylov_descent.curvature.forward_mode import Along, BatchProduct
from krylov_descent.curvature.lean_functions import LeanFunctions
from krylov_descent.objective.batches import Batch, Tree, floating_tensors_in, map_tensors
from krylov_descent.objective.contract_probe import Findings
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import first_line, is_out_of_memory
from krylov_descent.runtime.precision import forward_precision

Linearize = Callable[[Network, Batch], BatchProduct]

# Relative tolerance of first derivatives by forward mode: cuDNN's convolutions may have fewer
# digits than the other operations.
FORWARD_TOLERANCE = 1e-2
# Relative tolerance of first derivatives by differences: in float32 a kink may change these by some
# per cent.
DIFFERENCE_TOLERANCE = 0.2
# Differences are compared only where gradients are large: along parameters with small gradients a
# difference is rounding.
DIFFERENCE_FAINT = 1.0


class CurvatureError(RuntimeError):
    """No route of differentiation gives this curvature for this model."""


def check_by_double_backward(
    kind: str, linearize: Linearize, network: Network, few: Batch, findings: Findings
) -> None:
    """Check products by double backward.

    Raises:
        RuntimeError: an operation has no double backward, or one that leaves a part out.
        CurvatureError: the loss has no second derivative in the outputs, so no route can compute
            Gauss-Newton products.
    """
    with LeanFunctions():
        found = _differentiated(kind, network, few)
    if kind == "gauss-newton":
        _check_loss(network, found, few, findings)
        _warn_of_linear_loss(network, found, few)
    parameters, epsilon = network.parameters.tensors, findings.derivative_epsilon
    check_double_backward(floating_tensors_in(found), parameters, epsilon)
    if kind == "hessian":
        _check_hessian(linearize, network, few, findings)


def check_by_forward_mode(
    kind: str, linearize: Linearize, network: Network, few: Batch, findings: Findings
) -> None:
    """Check products by forward-mode differentiation.

    Raises:
        RuntimeError: an operation has no forward derivative, or one that leaves a part out.
    """
    epsilon = findings.derivative_epsilon
    function = forward_mode.outputs_of if kind == "gauss-newton" else forward_mode.losses_of
    along = forward_mode.along(network, function(network, few))
    tolerance = max(math.sqrt(epsilon), FORWARD_TOLERANCE)
    _check_along(kind, along, network, few, epsilon, tolerance)
    if kind == "hessian":
        _check_hessian(linearize, network, few, findings)
    else:
        _try(linearize, network, few)


def check_by_differences(
    kind: str, linearize: Linearize, network: Network, few: Batch, findings: Findings
) -> None:
    """Check products by central differences.

    Raises:
        RuntimeError: the backward pass is not the gradient of the loss, or goes to parameters that
            cannot be replaced for a forward pass.
    """
    outputs, losses = finite_differences.outputs_along, finite_differences.losses_along
    of = outputs if kind == "gauss-newton" else losses
    along = of(network, few, relative_step(findings.epsilon))
    _check_along(kind, along, network, few, DIFFERENCE_FAINT, DIFFERENCE_TOLERANCE)
    _try(linearize, network, few)


def _try(linearize: Linearize, network: Network, few: Batch) -> None:
    """Compute one product, to see that everything it needs is there."""
    linearize(network, few)([torch.ones_like(p) for p in network.parameters.tensors])


def _differentiated(kind: str, network: Network, few: Batch) -> Tree:
    """The outputs or per-sample losses that J is the derivative of."""
    return (outputs_of if kind == "gauss-newton" else losses_of)(network, few)


def _check_along(
    kind: str, along: Along, network: Network, few: Batch, faint: float, tolerance: float
) -> None:
    """Raise unless Jv, from forward passes with other parameters, fits the backward pass."""
    names = _out_of_reach(kind, network, few)
    if names:
        raise RuntimeError(
            f"the forward pass or the loss has a variable of its own for {', '.join(names[:3])}: "
            "read parameters as attributes of the model, where they are"
        )
    found = floating_tensors_in(_differentiated(kind, network, few))
    check_along(found, network.parameters.tensors, along, faint, tolerance)


def _out_of_reach(kind: str, network: Network, few: Batch) -> list[str]:
    """Names of parameters that the model still uses when it has others in their place."""
    parameters = network.parameters.tensors
    others = [p.detach().clone().requires_grad_() for p in parameters]
    found = network.call_with(others, network.names, lambda: _differentiated(kind, network, few))
    active = [z for z in floating_tensors_in(found) if z.requires_grad]
    reached: tuple[Tensor | None, ...] = torch.autograd.grad(
        active, parameters, [torch.ones_like(z) for z in active], allow_unused=True
    )
    return [name for name, g in zip(network.names, reached, strict=True) if g is not None]


def _check_hessian(linearize: Linearize, network: Network, few: Batch, findings: Findings) -> None:
    # Double backward is checked, too, because torch's is wrong for weight_norm of a convolution.
    product, parameters = linearize(network, few), network.parameters.tensors
    check_symmetric(product, parameters, findings.derivative_epsilon)
    operations = foreign_operations([losses_of(network, few)])
    if not operations or _out_of_reach("hessian", network, few):
        return
    network, few, epsilon = _most_precise(network, few, findings)

    def losses(values: list[Tensor]) -> Tensor:
        found: Tensor = network.call_with(values, network.names, lambda: losses_of(network, few))
        return found

    with forward_precision():
        product, parameters = linearize(network, few), network.parameters.tensors
        _check_second_derivative(losses, parameters, product, epsilon, operations)


def _check_loss(network: Network, outputs: Tree, few: Batch, findings: Findings) -> None:
    """Raise CurvatureError unless the loss can be differentiated twice in the outputs.

    On all routes, H_E is computed by double backward where it has no closed form.
    """
    try:
        losses = _losses_differentiated_twice(network, outputs, few, findings.derivative_epsilon)
        operations = foreign_operations([losses])
        if operations:
            _check_output_hessian(*_most_precise(network, few, findings), operations)
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        raise CurvatureError(
            f"the loss has no second derivative in the outputs ({first_line(problem)}): write it "
            "with operations that can be differentiated twice, or use curvature='fisher' or "
            "'hessian', which can do with its gradient"
        ) from problem


def _check_output_hessian(
    network: Network, few: Batch, epsilon: float, operations: list[str]
) -> None:
    outputs = _as_leaves(outputs_of(network, few))

    def losses(values: list[Tensor]) -> Tensor:
        left = iter(values)
        changed = map_tensors(lambda z: next(left) if z.is_floating_point() else z, outputs)
        return network.losses_of(changed, few, eager=True)

    with forward_precision():
        product = network.output_hessian(outputs, few)
        _check_second_derivative(losses, floating_tensors_in(outputs), product, epsilon, operations)


def _losses_differentiated_twice(
    network: Network, outputs: Tree, few: Batch, epsilon: float
) -> Tensor:
    """The losses [m] in the graph of leaves with the outputs' values.

    Large outputs saturate a softmax or a sigmoid, whose derivatives are little but rounding then.
    So a check that fails is repeated at outputs between -1 and 1.

    Raises:
        RuntimeError: the losses cannot be differentiated twice.
    """

    def checked(outputs: Tree) -> Tensor:
        apart = _as_leaves(outputs)
        losses = network.losses_of(apart, few, eager=True)
        check_double_backward([losses], floating_tensors_in(apart), epsilon)
        return losses

    try:
        return checked(outputs)
    except RuntimeError as problem:
        largest = max(float(z.detach().abs().max()) for z in floating_tensors_in(outputs))
        if is_out_of_memory(problem) or not 1 < largest < math.inf:
            raise
        return checked(map_tensors(lambda z: z / largest if z.is_floating_point() else z, outputs))


def _as_leaves(outputs: Tree) -> Tree:
    return map_tensors(lambda z: z.detach().requires_grad_(z.is_floating_point()), outputs)


def _most_precise(network: Network, few: Batch, findings: Findings) -> tuple[Network, Batch, float]:
    """Model and samples, in float64 if the model runs in it, and the arithmetic's epsilon."""
    try:
        double = network.in_double()
        samples = few.map(lambda t: t.double() if t.is_floating_point() else t)
        losses_of(double, samples)
    except Exception as problem:  # the model cannot be copied, or runs in float32 alone
        if is_out_of_memory(problem):
            raise
        return network, few, findings.epsilon
    return double, samples, torch.finfo(torch.float64).eps


def _check_second_derivative(
    losses: Callable[[list[Tensor]], Tensor],
    point: list[Tensor],
    product: Callable[[list[Tensor]], Sequence[Tensor | None]],
    epsilon: float,
    operations: list[str],
) -> None:
    """Raise if products with the second derivative of Σ losses differ from gradient differences."""

    def at(values: list[Tensor]) -> list[Tensor]:
        return [losses([v.requires_grad_() for v in values]).detach()]

    def gradient(values: list[Tensor]) -> list[Tensor]:
        return gradients(losses([v.requires_grad_() for v in values]).sum(), values)

    def along(v: Sequence[Tensor]) -> list[Tensor]:
        return central_difference(at, point, v, relative_step(epsilon))

    def difference(v: Sequence[Tensor], step: float) -> list[Tensor]:
        return central_difference(gradient, point, v, step)

    try:
        check_along([losses(point)], point, along, DIFFERENCE_FAINT, DIFFERENCE_TOLERANCE)
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        # A straight-through estimator: its backward pass is no gradient, so there is no derivative
        # of a gradient to compare with.
        return
    check_differences(product, difference, point, epsilon, operations)


def _warn_of_linear_loss(network: Network, outputs: Tree, few: Batch) -> None:
    """Warn of a loss that is linear in the outputs, for which JᵀH_E J is zero."""
    # Cosines and not ones: a softmax has no curvature along (1, …, 1).
    directions = [
        torch.arange(z.numel(), device=z.device).cos().to(z.dtype).reshape(z.shape)
        for z in floating_tensors_in(outputs)
    ]
    curved = network.output_hessian(outputs, few)(directions)
    if not any(bool(z.any()) for z in curved):
        warnings.warn(
            "the loss is linear in the model's outputs, as NLLLoss is in log-probabilities, so "
            "the Gauss-Newton matrix is zero and steps follow the gradient alone: use "
            "CrossEntropyLoss on the logits, or curvature='hessian' or 'fisher'",
            stacklevel=2,
        )
