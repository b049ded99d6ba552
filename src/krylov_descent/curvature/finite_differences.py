"""Curvature products by central differences, for models that have only first derivatives.

    Gauss-Newton   Jv ≈ (z(θ + hv) − z(θ − hv)) / 2h by two forward passes, then Jᵀ(H_E Jv) by a
                   backward pass
    Fisher         as Gauss-Newton, with the per-sample losses as z and H_E = I
    Hessian        Hv ≈ (g(θ + hv) − g(θ − hv)) / 2h by two gradients

The step h changes the parameters by ε^⅓ of their size, with ε the machine epsilon of the
arithmetic. Then both errors of a central difference have about the same size: the rounding error
ε/h and the error h² of the third derivative. So a product of a smooth model is exact to about ε^⅔:
4·10⁻¹¹ in float64, 2·10⁻⁵ in float32. ReLU units that switch between θ − hv and θ + hv add an error
of some per cent of Jv in float32. A Hessian by differences includes the kinks.

A difference needs every digit, so nothing here runs in TensorFloat-32 unless the forward pass does.
The parameters themselves are not written to.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from krylov_descent.curvature.forward_mode import Along, BatchProduct
from krylov_descent.objective.batches import Batch, floating_tensors_in
from krylov_descent.objective.losses import OutputHessian
from krylov_descent.objective.network import Call, Network, require_graph
from krylov_descent.runtime.precision import forward_precision

# The least size of a tensor, relative to the typical size of all parameters.
LEAST_SIZE = 0.1

# The tensors of a point → the values there.
Function = Callable[[list[Tensor]], list[Tensor]]


def relative_step(epsilon: float) -> float:
    """The size of a step relative to the parameters, ε^⅓, for an arithmetic with this epsilon."""
    return float(epsilon ** (1 / 3))


def central_difference(
    function: Function, point: Sequence[Tensor], direction: Sequence[Tensor], step: float
) -> list[Tensor]:
    """The derivative of a function at a point along a direction, from two values of the function.

    Args:
        function: takes tensors shaped like those of the point.
        point: θ.
        direction: v, in pieces shaped like those of the point; of any length.
        step: the length of hv relative to θ.
    """
    h = _scale(point, direction, step)
    ahead = function([p.detach() + h * v for p, v in zip(point, direction, strict=True)])
    behind = function([p.detach() - h * v for p, v in zip(point, direction, strict=True)])
    return [(a - b) / (2 * h) for a, b in zip(ahead, behind, strict=True)]


def _scale(point: Sequence[Tensor], direction: Sequence[Tensor], step: float) -> Tensor:
    """h as a tensor, so that the host does not wait for a GPU; the step itself if v is zero."""
    # Relative to each tensor by itself: an embedding may have a hundred times the norm of the
    # layers behind it.
    lengths, sizes = (torch.stack([_norm(t) for t in tensors]) for tensors in (direction, point))
    counts = [t.numel() for t in point]
    typical = sizes.norm() / math.sqrt(sum(counts))
    typical = torch.where(typical > 0, typical, 1.0)
    # The size of a tensor has a floor, because biases of zero give no scale for a small change.
    sizes = sizes.maximum(LEAST_SIZE * typical * sizes.new_tensor(counts).clamp(min=1).sqrt())
    relative = (lengths / sizes).norm()
    return step / torch.where(relative > 0, relative, 1.0)


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm


def outputs_along(network: Network, batch: Batch, step: float) -> Along:
    """v → Jv for the floating-point outputs. Costs two forward passes."""

    def outputs() -> list[Tensor]:
        return [z.detach() for z in floating_tensors_in(network.outputs(batch, eager=True))]

    return _along(network, outputs, step)


def losses_along(network: Network, batch: Batch, step: float) -> Along:
    """v → (g₁ᵀv, …, g_Nᵀv) as one tensor [N]. Costs two forward passes."""

    def losses() -> list[Tensor]:
        return [network.sample_losses(batch, eager=True).detach()]

    return _along(network, losses, step)


def gauss_newton(network: Network, batch: Batch, step: float) -> BatchProduct:
    """v → Σ JᵀH_E Jv over the batch. A product costs about two gradients."""

    def outputs() -> tuple[list[Tensor], OutputHessian]:
        found = network.outputs(batch, eager=True)
        return floating_tensors_in(found), network.output_hessian(found, batch)

    return _around(network, outputs, outputs_along(network, batch, step))


def fisher(network: Network, batch: Batch, step: float) -> BatchProduct:
    """v → Σ gᵢgᵢᵀv over the batch. A product costs about two gradients."""

    def losses() -> tuple[list[Tensor], OutputHessian]:
        return [network.sample_losses(batch, eager=True)], lambda tangents: tangents

    return _around(network, losses, losses_along(network, batch, step))


def hessian(network: Network, batch: Batch, step: float) -> BatchProduct:
    """v → Σ ∂²nᵢ v over the batch, with losses nᵢ. A product costs about two gradients."""

    def gradient(values: list[Tensor]) -> list[Tensor]:
        losses = _at(network, values, lambda: network.sample_losses(batch, eager=True))
        require_graph(losses)
        return gradients(losses.sum(), values)

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        with forward_precision():
            tensors = network.parameters.tensors
            return list(central_difference(gradient, tensors, pieces, step))

    return product


def gradients(total: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """∂total/∂leaves; zeros for leaves that the total does not depend on."""
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def _around(
    network: Network, outputs: Callable[[], tuple[list[Tensor], OutputHessian]], along: Along
) -> BatchProduct:
    """v → Jᵀ(H_E Jv), from a function that gives the outputs with their H_E, and from v → Jv."""

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        with forward_precision():
            tangents = along(pieces)
            # Only after `along`, so that the graph of one forward pass exists at a time.
            found, middle = outputs()
            active = [z for z in found if z.requires_grad]
            if not active:
                require_graph(found[0])
            # As in autograd, outputs that require no gradient count as constant.
            moved = [
                t if z.requires_grad else torch.zeros_like(z)
                for t, z in zip(tangents, found, strict=True)
            ]
            curved = [c for c, z in zip(middle(moved), found, strict=True) if z.requires_grad]
            return list(
                torch.autograd.grad(active, network.parameters.tensors, curved, allow_unused=True)
            )

    return product


def _along(network: Network, function: Call, step: float) -> Along:
    def at(values: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = _at(network, values, function)
        return found

    def along(pieces: Sequence[Tensor]) -> list[Tensor]:
        with forward_precision():
            return central_difference(at, network.parameters.tensors, pieces, step)

    return along


def _at(network: Network, values: list[Tensor], function: Call) -> Any:
    """Call a function of the network with other values in place of the parameters."""
    for value in values:
        value.requires_grad_()  # the forward pass may itself differentiate
    return network.call_with(values, network.names, function)
