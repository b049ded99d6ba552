"""A network on aliases of its parameters, for what runs on a stream of its own."""

import torch
from torch import Tensor

from krylov_descent.batches import Batch, Tree, tensors_in
from krylov_descent.branches import begin
from krylov_descent.network import Network
from krylov_descent.parameters import FlatParameters
from krylov_descent.tensor_cores.entry import under_way


class Aliased(Network):
    """The network on aliases of its parameters: the same numbers, a place of their own in autograd.

    Autograd ties a parameter to the stream it was first used on, and holds on to that while any
    graph that uses it lives; a recording is made on a stream of its own.

    Args:
        network: the network itself.
        point: other numbers [n] in place of its parameters'.
    """

    def __init__(self, network: Network, point: Tensor | None = None) -> None:
        vars(self).update(vars(network))
        self._original, parameters = network, network.parameters
        tensors = parameters.tensors if point is None else parameters.pieces(point)
        aliases = [tensor.detach().requires_grad_() for tensor in tensors]
        self.parameters = FlatParameters(aliases, parameters.weight_decay)

    def at(self, point: Tensor) -> "Aliased":
        """The same at another point [n], which the parameters know nothing of."""
        return Aliased(self._original, point)

    @property
    def original(self) -> Network:
        return self._original

    def outputs(self, batch: Batch, *, eager: bool = False) -> Tree:
        products, original = under_way(), self._original
        if products is not None:
            differentiated = self.loss.is_plain_cross_entropy and torch.is_grad_enabled()
            targets = tensors_in(batch.targets) if differentiated else []
            matrices = [*self.parameters.tensors, *tensors_in(batch.inputs)]
            begin(products.prepare(matrices, targets))
        return original.call_with(
            self.parameters.tensors, self.names, lambda: original.outputs(batch, eager=eager)
        )
