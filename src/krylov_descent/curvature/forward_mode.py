"""Curvature products by forward-mode differentiation, for models without a double backward.

Every product runs a fresh forward pass: Jv by `torch.func.jvp` and Jᵀw by `torch.func.vjp`. A
Hessian product is the gradient of the forward derivative. The forward derivative of the gradient is
not possible here, because it would differentiate the backward pass.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from krylov_descent.objective.batches import Batch, tensors_in
from krylov_descent.objective.losses import OutputHessian
from krylov_descent.objective.network import Network
from krylov_descent.runtime.threads import Shared

# A process-wide switch. While one thread is in this context, attention uses the unfused kernels in
# all threads. Its results change by rounding only, and it takes longer.
unfused_attention = Shared(partial(sdpa_kernel, SDPBackend.MATH))

Values = tuple[Tensor, ...]
# v → Hv summed over one batch, in pieces shaped like the parameters; None is a piece of zeros.
BatchProduct = Callable[[list[Tensor]], list[Tensor | None]]
Function = Callable[[Values], Values]
# v in pieces shaped like the parameters → Jv, the derivative along v.
Along = Callable[[Sequence[Tensor]], list[Tensor]]


def outputs_of(network: Network, batch: Batch) -> Function:
    """The floating-point outputs as a function of the parameters' values."""

    def outputs(values: Values) -> Values:
        with unfused_attention:  # the fused kernels have no forward derivative
            found = network.call_with(
                values, network.names, lambda: network.outputs(batch, eager=True)
            )
        return tuple(z for z in tensors_in(found) if z.is_floating_point())

    return outputs


def losses_of(network: Network, batch: Batch) -> Function:
    """The per-sample losses as a function of the parameters' values."""
    return lambda values: (_losses(network, batch, values),)


def along(network: Network, function: Function) -> Along:
    """v → Jv, for J the derivative of a function of the parameters' values."""

    def tangents(pieces: Sequence[Tensor]) -> list[Tensor]:
        found: Values = torch.func.jvp(function, (_values(network),), (tuple(pieces),))[1]
        return list(found)

    return tangents


def gauss_newton(network: Network, batch: Batch) -> BatchProduct:
    """v → Σ JᵀH_E Jv over the batch. A product costs about 2.3 gradients."""
    with torch.no_grad():
        middle = network.output_hessian(network.outputs(batch, eager=True), batch)
    return _around(network, outputs_of(network, batch), middle)


def fisher(network: Network, batch: Batch) -> BatchProduct:
    """v → Σ gᵢgᵢᵀv over the batch."""
    return _around(network, losses_of(network, batch), lambda tangents: tangents)


def hessian(network: Network, batch: Batch) -> BatchProduct:
    """v → Σ ∂²nᵢ v over the batch, with losses nᵢ."""

    def total(values: Values) -> Tensor:
        return _losses(network, batch, values).sum()

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        def slope(values: Values) -> Tensor:
            along: Tensor = torch.func.jvp(total, (values,), (tuple(pieces),))[1]
            return along

        return list(torch.func.grad(slope)(_values(network)))

    return product


def _around(network: Network, outputs: Function, middle: OutputHessian) -> BatchProduct:
    tangents = along(network, outputs)

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        curved = middle(tangents(pieces))
        transposed = torch.func.vjp(outputs, _values(network))[1]
        (result,) = transposed(tuple(curved))
        return list(result)

    return product


def _losses(network: Network, batch: Batch, values: Values) -> Tensor:
    with unfused_attention:
        losses: Tensor = network.call_with(
            values, network.names, lambda: network.sample_losses(batch, eager=True)
        )
    return losses


def _values(network: Network) -> Values:
    return tuple(p.detach() for p in network.parameters.tensors)
