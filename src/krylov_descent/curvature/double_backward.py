"""Curvature products by double backward: the graph is built once and used for every product.

Jᵀu is a backward pass, linear in u. The graph of this backward pass is kept. A backward pass
through it, towards u, is Jv. Neither product repeats the forward pass.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from krylov_descent.curvature.forward_mode import BatchProduct, unfused_attention
from krylov_descent.curvature.lean_functions import LeanFunctions
from krylov_descent.objective.batches import Batch, Tree, floating_tensors_in
from krylov_descent.objective.layers.layer_gradients import Reach
from krylov_descent.objective.layers.linear_layers import NUMPYS, recorded_linear_layers
from krylov_descent.objective.losses import OutputHessian
from krylov_descent.objective.network import Network, require_graph
from krylov_descent.runtime.ops import operations
from krylov_descent.runtime.private import DispatchMode


def linearize_outputs(reach: Reach, outputs: list[Tensor], middle: OutputHessian) -> BatchProduct:
    """Prepare v → Jᵀ(middle(Jv)), with J the derivative of the outputs towards the parameters.

    Args:
        reach: the tensors that stand for the parameters in the autograd graph of the outputs.
        outputs: the differentiated tensors.
        middle: tangents of the outputs → cotangents of the outputs.
    """
    active = [z for z in outputs if z.requires_grad]
    if not active:
        require_graph(outputs[0])
    directions = [torch.zeros_like(z, requires_grad=True) for z in active]
    zeros: AbstractContextManager[Any] = nullcontext()
    if reach.on_cpu_and_large and operations().may_read:
        zeros = _ProductsOfZeros()
    with zeros:
        transposed: tuple[Tensor | None, ...] = torch.autograd.grad(
            active, reach.tensors, directions, create_graph=True, allow_unused=True
        )
    # The gradient edges are enough for products. The n numbers of Jᵀ0 are freed.
    reached = {
        i: get_gradient_edge(image)
        for i, image in enumerate(transposed)
        if image is not None and image.requires_grad
    }
    del transposed

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        # v → Jv → H_E Jv → JᵀH_E Jv
        room, given = reach.room(), reach.from_parameters(pieces)
        moved = iter(
            torch.autograd.grad(
                list(reached.values()),
                directions,
                [given[i] for i in reached],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        )
        tangents = [next(moved) if z.requires_grad else torch.zeros_like(z) for z in outputs]
        del given
        curved = middle(tangents)
        found = torch.autograd.grad(
            active,
            reach.tensors,
            [c for c, z in zip(curved, outputs, strict=True) if z.requires_grad],
            retain_graph=True,
            allow_unused=True,
        )
        return reach.to_parameters(found, room)

    return product


class _ProductsOfZeros(DispatchMode):
    """A dispatch mode that returns zeros for the CPU product of a zero matrix with another matrix.

    Building the graph of Jᵀu computes Jᵀ0, which consists of such products.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called in place of every operation on tensors."""
        if func is torch.ops.aten.mm.default and _is_zero(args[0]):
            a, b = args
            return a.new_zeros(a.shape[0], b.shape[1])
        return func(*args, **(kwargs or {}))


def _is_zero(matrix: Tensor) -> bool:
    plain = type(matrix) is Tensor and matrix.dtype in NUMPYS
    dense = matrix.layout is torch.strided and matrix.device.type == "cpu"
    return plain and dense and not matrix.detach().numpy().any()


def gauss_newton(network: Network, batch: Batch) -> BatchProduct:
    """v → Σ JᵀH_E Jv over the batch. A product costs about 4/3 of a gradient."""
    with recorded_linear_layers(network.eager) as layers, LeanFunctions(only_linear=True):
        outputs = outputs_of(network, batch)
    middle = network.output_hessian(outputs, batch)
    found = floating_tensors_in(outputs)
    return linearize_outputs(Reach(network, layers, found), found, middle)


def fisher(network: Network, batch: Batch) -> BatchProduct:
    """v → Σ gᵢgᵢᵀv over the batch: Gauss-Newton of the per-sample losses with H_E = I."""
    with recorded_linear_layers(network.eager) as layers, LeanFunctions(only_linear=True):
        losses = losses_of(network, batch)
    return linearize_outputs(Reach(network, layers, [losses]), [losses], lambda tangents: tangents)


def hessian(network: Network, batch: Batch) -> BatchProduct:
    """v → Σ ∂²nᵢ v over the batch, with losses nᵢ: ∂(gradient)/∂θ along v (Pearlmutter)."""
    parameters = network.parameters.tensors
    with LeanFunctions():
        losses = losses_of(network, batch)
    require_graph(losses)
    network.check_leaves([losses])
    gradient: tuple[Tensor | None, ...] = torch.autograd.grad(
        losses, parameters, torch.ones_like(losses), create_graph=True, allow_unused=True
    )
    curved = {
        i: get_gradient_edge(part)
        for i, part in enumerate(gradient)
        if part is not None and part.requires_grad
    }
    del gradient

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        if not curved:  # the losses are linear in the parameters
            return [None] * len(parameters)
        return list(
            torch.autograd.grad(
                list(curved.values()),
                parameters,
                [pieces[i] for i in curved],
                retain_graph=True,
                allow_unused=True,
            )
        )

    return product


def outputs_of(network: Network, batch: Batch) -> Tree:
    """The outputs of a batch, with a graph that can be differentiated twice."""
    with unfused_attention:  # the fused kernels have no second derivative
        return network.outputs(batch, eager=True)


def losses_of(network: Network, batch: Batch) -> Tensor:
    """The per-sample losses of a batch, with a graph that can be differentiated twice."""
    with unfused_attention:
        return network.sample_losses(batch, eager=True)
