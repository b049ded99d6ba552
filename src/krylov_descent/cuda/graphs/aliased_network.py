"""A network on aliases of its parameters, for passes on a separate stream."""

from collections.abc import Sequence

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.parallel_branches import begin
from krylov_descent.cuda.triton.entry import under_way
from krylov_descent.objective.batches import Batch, Tree, tensors_in
from krylov_descent.objective.layers.graph_walks import leaves
from krylov_descent.objective.network import Network
from krylov_descent.objective.parameters import FlatParameters


class Aliased(Network):
    """The network on aliases of its parameters: the same memory, but other leaves in autograd.

    Autograd ties a leaf to the stream of its first use as long as any graph uses the leaf.
    Recordings are made on a separate stream, so they need separate leaves.

    Args:
        network: the network itself.
        point: parameter values [n] to use in place of the network's.
    """

    def __init__(self, network: Network, point: Tensor | None = None) -> None:
        vars(self).update(vars(network))
        self._original, parameters = network, network.parameters
        tensors = parameters.tensors if point is None else parameters.pieces(point)
        aliases = [tensor.detach().requires_grad_() for tensor in tensors]
        self.parameters = FlatParameters(aliases, parameters.weight_decay)

    def at(self, point: Tensor) -> "Aliased":
        """The network at another point [n]; its parameters are not written to."""
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

    def losses_of(self, outputs: Tree, batch: Batch, *, eager: bool = False) -> Tensor:
        if self.loss.known:  # one of torch's losses, which use no parameters
            return super().losses_of(outputs, batch, eager=eager)
        losses: Tensor = self._original.call_with(
            self.parameters.tensors,
            self.names,
            lambda: self._original.losses_of(outputs, batch, eager=eager),
        )
        return losses

    def check_leaves(self, roots: Sequence[Tensor]) -> None:
        """Check that the autograd graph of the roots uses no parameter in place of its alias.

        Raises:
            RuntimeError: the forward pass or the loss holds a parameter outside of the modules, in
                a list for example.
        """
        names = dict(zip(map(id, self._original.parameters.tensors), self.names, strict=True))
        found = next((names[id(leaf)] for leaf in leaves(roots) if id(leaf) in names), None)
        if found is not None:
            raise RuntimeError(
                f"the forward pass or the loss holds {found!r} itself: read it from the model at "
                "each call"
            )
