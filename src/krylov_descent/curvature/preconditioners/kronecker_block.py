"""The block of D for one Linear layer, from its two Kronecker factors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from krylov_descent.curvature.preconditioners.layer_moments import LinearPlace


@dataclass(frozen=True, slots=True)
class Block:
    """The damped factors A [inputs, inputs] and G [outputs, outputs], and their inverses."""

    place: LinearPlace
    of_inputs: Tensor
    of_outputs: Tensor
    inverse_of_inputs: Tensor
    inverse_of_outputs: Tensor

    @classmethod
    def empty(cls, place: LinearPlace, like: Tensor) -> "Block":
        """Uninitialised factors of a layer, in the dtype and on the device of a tensor."""
        sizes = place.inputs, place.outputs
        return cls(place, *(like.new_empty(size, size) for size in sizes + sizes))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Both factors and both inverses."""
        return self.of_inputs, self.of_outputs, self.inverse_of_inputs, self.inverse_of_outputs

    def is_like(self, tensor: Tensor) -> bool:
        """Whether the factors have the dtype and device of a tensor."""
        return (self.of_inputs.dtype, self.of_inputs.device) == (tensor.dtype, tensor.device)

    def filling(
        self, A: Tensor, G: Tensor, gamma: Tensor, unit: Tensor
    ) -> list[tuple[int, Callable[[], None]]]:
        """Independent jobs that compute the factors and inverses in place, from A, G and γ.

        Each job comes with the number of rows of its factor. A and G are divided by `unit`.
        """
        # If the inputs or the cotangents of a layer are zero, any π will do.
        ratio = (A.trace() / len(A)) / (G.trace() / len(G))
        pi = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0).sqrt()
        inputs, outputs = self.of_inputs, self.of_outputs
        return [
            (len(A), partial(_invert, A, gamma * pi, unit, inputs, self.inverse_of_inputs)),
            (len(G), partial(_invert, G, gamma / pi, unit, outputs, self.inverse_of_outputs)),
        ]

    def apply(self, given: Sequence[Tensor], result: Sequence[Tensor], *, inverse: bool) -> None:
        """Write GVA, or G⁻¹VA⁻¹ if `inverse`, to `result`; V are this layer's pieces of `given`."""
        weight, bias = self.place.weight, self.place.bias
        matrix = given[weight]
        if bias is not None:
            matrix = torch.cat([matrix, given[bias].unsqueeze(1)], 1)
        left, right = self.of_outputs, self.of_inputs
        if inverse:
            left, right = self.inverse_of_outputs, self.inverse_of_inputs
        matrix = left @ matrix @ right
        result[weight].copy_(matrix[:, : result[weight].shape[1]])
        if bias is not None:
            result[bias].copy_(matrix[:, -1])


def _invert(factor: Tensor, damping: Tensor, unit: Tensor, damped: Tensor, inverse: Tensor) -> None:
    """Write factor / unit + damping to `damped`, and its inverse to `inverse`.

    With a Cholesky factor L the inverse is L⁻ᵀL⁻¹.
    """
    torch.div(factor, unit, out=damped)
    damped.diagonal().add_(damping)
    lower = torch.linalg.cholesky_ex(damped)[0]
    eye = torch.eye(len(damped), dtype=damped.dtype, device=damped.device)
    root = torch.linalg.solve_triangular(lower, eye, upper=False)
    torch.mm(root.t(), root, out=inverse)
