"""The trainable parameters of a module as one flat vector θ ∈ Rⁿ.

Krylov Subspace Descent is formulated for one vector, and a module holds many tensors.
`FlatParameters` converts between them: it copies θ out, writes θ in, and splits a vector into
pieces shaped like the parameters. The parameters keep their own storage.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from krylov_descent.runtime.private import add_each, copy_each, norms_of, views_like

SUPPORTED_DTYPES = (torch.float32, torch.float64)


class Pieces(list["Tensor | None"]):
    """Pieces that are views of one vector [n], so that `FlatParameters.flatten` needs no copy."""

    def __init__(self, vector: Tensor, pieces: Iterable[Tensor | None]) -> None:
        super().__init__(pieces)
        self.vector = vector


class FlatParameters:
    """The trainable tensors of a model as one vector of `numel` numbers.

    Args:
        parameters: the tensors, each once, in a fixed order.
        weight_decay: λ of each tensor; the objective gains ½λ‖p‖².

    Raises:
        ValueError: there is no tensor, a tensor occurs twice, or dtypes or devices are mixed.
        TypeError: a dtype is neither float32 nor float64.
    """

    def __init__(self, parameters: Sequence[Tensor], weight_decay: Sequence[float]) -> None:
        self.tensors = list(parameters)
        self.weight_decay = [float(decay) for decay in weight_decay]
        _check(self.tensors)
        self.sizes = [p.numel() for p in self.tensors]
        self.numel = sum(self.sizes)
        self.dtype = self.tensors[0].dtype
        self.device = self.tensors[0].device

    @classmethod
    def from_groups(cls, groups: Iterable[dict[str, Any]]) -> "FlatParameters":
        """The tensors of torch.optim parameter groups that currently require a gradient."""
        trainable = [
            (p, group.get("weight_decay", 0.0))
            for group in groups
            for p in group["params"]
            if p.requires_grad
        ]
        return cls([p for p, _ in trainable], [decay for _, decay in trainable])

    def same_as(self, other: "FlatParameters") -> bool:
        """Whether both hold the same tensors in the same order with the same weight decay.

        Dtype and device must agree, too, because `model.double()` changes tensors in place.
        """
        return (
            len(self.tensors) == len(other.tensors)
            and all(a is b for a, b in zip(self.tensors, other.tensors, strict=True))
            and self.weight_decay == other.weight_decay
            and (self.dtype, self.device) == (other.dtype, other.device)
        )

    def copy(self) -> Tensor:
        """θ as a new vector [n]."""
        return self.flatten([p.detach() for p in self.tensors])

    @torch.no_grad()
    def assign(self, vector: Tensor) -> None:
        """Write the vector [n] into the parameters, in place and exactly."""
        copy_each(self.tensors, self.pieces(vector))

    def pieces(self, vector: Tensor) -> list[Tensor]:
        """Views of a vector [n], one like each parameter; no copy. ValueError if n is wrong."""
        if len(vector) != self.numel:
            raise ValueError(f"a vector of {self.numel} numbers is needed, found {len(vector)}")
        return views_like(vector, self.tensors)

    def empty_pieces(self) -> list[Tensor]:
        """New uninitialised tensors, one like each parameter."""
        return [torch.empty_like(p) for p in self.tensors]

    def copied_pieces(self, vector: Tensor) -> list[Tensor]:
        """The pieces of a vector [n] as new tensors, one like each parameter."""
        copies = self.empty_pieces()
        copy_each(copies, self.pieces(vector))
        return copies

    def empty(self) -> Tensor:
        """A new uninitialised vector [n]."""
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def flatten(self, pieces: Sequence[Tensor | None]) -> Tensor:
        """Concatenate pieces shaped like the parameters to a new vector [n]; None means zeros.

        For `Pieces` the result is the vector that they are views of, without a copy.
        """
        if isinstance(pieces, Pieces):
            return pieces.vector
        return torch.cat(
            [
                p.new_zeros(p.numel()) if piece is None else piece.reshape(-1)
                for piece, p in zip(pieces, self.tensors, strict=True)
            ]
        )

    def add(self, total: Tensor | None, pieces: Sequence[Tensor | None]) -> Tensor:
        """Add pieces to the vector `total` [n] in place; flatten them if `total` is None."""
        if total is None:
            return self.flatten(pieces)
        for target, piece in zip(self.pieces(total), pieces, strict=True):
            if piece is not None:
                target.add_(piece)
        return total

    def scale_decay(self, factor: float) -> None:
        """Multiply λ of each tensor by a factor."""
        self.weight_decay = [factor * decay for decay in self.weight_decay]

    def decay_term(self) -> Tensor:
        """½ Σ λ‖p‖² at the current parameters: a float64 scalar on their device."""
        total: Tensor | None = None
        for decay in set(self.weight_decay) - {0.0}:
            chosen = [
                p.detach()
                for p, own in zip(self.tensors, self.weight_decay, strict=True)
                if own == decay
            ]
            norms = torch.stack(norms_of(chosen))
            term = 0.5 * decay * norms.square().sum()
            total = term if total is None else total + term
        return torch.zeros((), dtype=torch.float64, device=self.device) if total is None else total

    def decay_value(self) -> float:
        """½ Σ λ‖p‖² at the current parameters, read by the host."""
        return float(self.decay_term()) if any(self.weight_decay) else 0.0

    def scale_and_add_decay(self, result: Tensor, scale: Tensor, vector: Tensor) -> Tensor:
        """Replace `result` [n] by scale · result + λ ⊙ vector; `scale` is a scalar tensor."""
        self.add_decay(result.mul_(scale), vector)
        return result

    def add_decay(self, result: Tensor, vector: Tensor | None = None) -> None:
        """Add λ ⊙ vector to `result` [n] in place; the vector is θ by default."""
        decays = set(self.weight_decay)
        if decays == {0.0}:
            return
        if vector is not None and len(decays) == 1:
            result.add_(vector, alpha=decays.pop())
            return
        targets = self.pieces(result)
        sources = [p.detach() for p in self.tensors] if vector is None else self.pieces(vector)
        for decay in decays - {0.0}:
            chosen = [i for i, own in enumerate(self.weight_decay) if own == decay]
            add_each([targets[i] for i in chosen], [sources[i] for i in chosen], decay)

    def add_decay_constant(self, diagonal: Tensor) -> None:
        """Add λ to each entry of a diagonal [n], in place."""
        decays = set(self.weight_decay)
        if decays == {0.0}:
            return
        if len(decays) == 1:
            diagonal.add_(decays.pop())
            return
        for target, decay in zip(self.pieces(diagonal), self.weight_decay, strict=True):
            if decay:
                target.add_(decay)


def _check(tensors: Sequence[Tensor]) -> None:
    if not tensors or not any(p.numel() for p in tensors):
        raise ValueError(
            "the model has no trainable parameters: give `params` at least one tensor "
            "with requires_grad=True"
        )
    for p in tensors:
        if p.dtype not in SUPPORTED_DTYPES:
            raise TypeError(
                f"parameters must be float32 or float64, found {p.dtype}: keep the parameters "
                "in float32 (and use torch.autocast for a low-precision forward pass)"
            )
    for attribute in ("dtype", "device"):
        found = sorted({str(getattr(p, attribute)) for p in tensors})
        if len(found) > 1:
            raise ValueError(
                f"all trainable parameters must share one {attribute}, found {', '.join(found)}: "
                f"move the model with model.to(...) first"
            )
    if len({id(p) for p in tensors}) < len(tensors):
        raise ValueError("`params` names the same tensor more than once: give each tensor once")
