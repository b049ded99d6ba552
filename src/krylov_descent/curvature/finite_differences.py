"""Curvature products by central differences, for models that have first derivatives alone.

    Gauss-Newton   Jv ≈ (z(θ + hv) − z(θ − hv)) / 2h by two forward passes, then Jᵀ(H_E Jv) by a
                   backward pass
    Fisher         the same, with the losses of the samples as z and H_E = I
    Hessian        Hv ≈ (g(θ + hv) − g(θ − hv)) / 2h by two gradients

Where h changes the parameters by ε^⅓ of their size, with ε of the arithmetic, both errors of a
central difference are of about the same size: that of rounding is ε/h, that of the third derivative
h². So a product of a smooth model is exact to about ε^⅔: 4·10⁻¹¹ in float64, 2·10⁻⁵ in float32.
Units of a ReLU that switch between θ − hv and θ + hv add to that: some per cent of Jv in float32,
and a Hessian that has the kinks in it.

A difference needs all the digits that there are, so nothing here is in TensorFloat-32 where the
forward pass is not. The parameters themselves are not written to.
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

# The size of a tensor beside the typical one of all parameters, if it is less.
LEAST_SIZE = 0.1

# Tensors at a point → tensors.
Function = Callable[[list[Tensor]], list[Tensor]]


def relative_step(epsilon: float) -> float:
    """By how much of their size to change the parameters, for an arithmetic of this epsilon."""
    return float(epsilon ** (1 / 3))


def central_difference(
    function: Function, point: Sequence[Tensor], direction: Sequence[Tensor], step: float
) -> list[Tensor]:
    """The derivative of a function at a point along a direction, by two of its values.

    Args:
        function: of tensors like those of the point.
        point: θ.
        direction: v, in pieces like those of the point; of any length.
        step: the length of hv beside θ.
    """
    h = _scale(point, direction, step)
    ahead = function([p.detach() + h * v for p, v in zip(point, direction, strict=True)])
    behind = function([p.detach() - h * v for p, v in zip(point, direction, strict=True)])
    return [(a - b) / (2 * h) for a, b in zip(ahead, behind, strict=True)]


def _scale(point: Sequence[Tensor], direction: Sequence[Tensor], step: float) -> Tensor:
    """h, as a tensor: a GPU is not waited for. The step itself where the direction is zero."""
    # Tensor by tensor: an embedding may have a hundred times the norm of the layers behind it.
    lengths, sizes = (torch.stack([_norm(t) for t in tensors]) for tensors in (direction, point))
    counts = [t.numel() for t in point]
    typical = sizes.norm() / math.sqrt(sum(counts))
    typical = torch.where(typical > 0, typical, 1.0)
    # Biases of zero tell nothing about what is a small change of them.
    sizes = sizes.maximum(LEAST_SIZE * typical * sizes.new_tensor(counts).clamp(min=1).sqrt())
    relative = (lengths / sizes).norm()
    return step / torch.where(relative > 0, relative, 1.0)


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
    return norm


def outputs_along(network: Network, batch: Batch, step: float) -> Along:
    """v → Jv for the outputs that can have a derivative; two forward passes."""

    def outputs() -> list[Tensor]:
        return [z.detach() for z in floating_tensors_in(network.outputs(batch, eager=True))]

    return _along(network, outputs, step)


def losses_along(network: Network, batch: Batch, step: float) -> Along:
    """v → (g₁ᵀv, …, g_Nᵀv) as one tensor; two forward passes."""

    def losses() -> list[Tensor]:
        return [network.sample_losses(batch, eager=True).detach()]

    return _along(network, losses, step)


def gauss_newton(network: Network, batch: Batch, step: float) -> BatchProduct:
    """v → Σ JᵀH_E Jv over the batch; about two gradients a product."""

    def outputs() -> tuple[list[Tensor], OutputHessian]:
        found = network.outputs(batch, eager=True)
        return floating_tensors_in(found), network.output_hessian(found, batch)

    return _around(network, outputs, outputs_along(network, batch, step))


def fisher(network: Network, batch: Batch, step: float) -> BatchProduct:
    """v → Σ gᵢgᵢᵀv over the batch; about two gradients a product."""

    def losses() -> tuple[list[Tensor], OutputHessian]:
        return [network.sample_losses(batch, eager=True)], lambda tangents: tangents

    return _around(network, losses, losses_along(network, batch, step))


def hessian(network: Network, batch: Batch, step: float) -> BatchProduct:
    """v → Σ ∂²nᵢ v over the batch; about two gradients a product."""

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
    """∂total/∂leaves; zeros where it does not depend on them."""
    return list(torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True))


def _around(
    network: Network, outputs: Callable[[], tuple[list[Tensor], OutputHessian]], along: Along
) -> BatchProduct:
    """v → Jᵀ(H_E Jv), for outputs with H_E at the parameters as they are, and their Jv."""

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        with forward_precision():
            tangents = along(pieces)
            # Not before: so there is the graph of one forward pass at a time.
            found, middle = outputs()
            active = [z for z in found if z.requires_grad]
            if not active:
                require_graph(found[0])
            # As by autograd: outputs without a gradient count as constant.
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
    """What a function of the network gives with other values in place of its parameters."""
    for value in values:
        value.requires_grad_()  # a forward pass may differentiate towards its own parameters
    return network.call_with(values, network.names, function)
