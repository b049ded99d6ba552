"""A network on aliases of its parameters, for what runs on a stream of its own."""

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

    def losses_of(self, outputs: Tree, batch: Batch, *, eager: bool = False) -> Tensor:
        if self.loss.known:  # torch's own, which uses none of the parameters
            return super().losses_of(outputs, batch, eager=eager)
        losses: Tensor = self._original.call_with(
            self.parameters.tensors,
            self.names,
            lambda: self._original.losses_of(outputs, batch, eager=eager),
        )
        return losses

    def check_leaves(self, roots: Sequence[Tensor]) -> None:
        """Refuse a graph that uses a parameter itself, and not its alias.

        Raises:
            RuntimeError: forward pass or loss hold a tensor of the model outside of its modules, in
                a list for example. The graph of the roots is no function of the aliases alone.
        """
        names = dict(zip(map(id, self._original.parameters.tensors), self.names, strict=True))
        found = next((names[id(leaf)] for leaf in leaves(roots) if id(leaf) in names), None)
        if found is not None:
            raise RuntimeError(
                f"the forward pass or the loss holds {found!r} itself: read it from the model at "
                "each call"
            )
