"""Sums of squared per-sample gradients, for the Fisher diagonal (paper, Section 4).

What is wanted is Σᵢ (∂nᵢ/∂θ)², the square inside the sum: not the square of the gradient.
Three routes, the first that holds for a parameter is taken:

1. Linear layers that see one row per sample. There ∂nᵢ/∂W = δᵢxᵢᵀ, so the squares factor:
   Σᵢ (δᵢxᵢᵀ)² = (δ²)ᵀ(x²), one more matrix product. A layer is trusted only after the same
   δ and x gave autograd's own gradient (δᵀx) on a first batch: where a layer is called twice,
   its weight is tied, or the forward itself differentiates, they do not.
2. vmap over samples elsewhere, in chunks that fit the memory for activations.
3. A loop over samples where vmap fails, with a warning of what it costs.

Never are N×n numbers held.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.batches import Batch, replace_tensors, tensors_in
from krylov_descent.losses import first_line
from krylov_descent.network import Network, require_graph
from krylov_descent.parameters import SUPPORTED_DTYPES

# Under autocast autograd's own gradient is rounded to few digits.
TRUST_TOLERANCE, COARSE_TOLERANCE = 1e-3, 3e-2


@dataclass(slots=True)
class _LinearCall:
    """One call of one Linear layer: what went in [m, in] and what came out [m, out]."""

    module: nn.Linear
    inputs: Tensor
    outputs: Tensor
    version: int  # of the outputs: it changes when an activation is computed in place
    calls: int = 1


class SquaredGradients:
    """Per-sample squares of a network's gradients, batch by batch.

    Cost of `of_batch`: one gradient, plus one third of it for layers of route 1, plus one to
    three gradients for route 2, plus a forward and backward pass per sample for route 3.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.forget()

    def forget(self) -> None:
        """Trust nothing any more: the model has changed."""
        self._trusted: dict[int, bool] = {}
        self._vmap_works = True

    def of_batch(
        self, batch: Batch, memory: int
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
        """Losses [m], Σ gradients and Σ squared gradients (one of each per parameter).

        Args:
            batch: m samples.
            memory: bytes the per-sample gradients of route 2 may take.
        """
        network = self._network
        parameters = network.parameters.tensors
        position = {id(p): i for i, p in enumerate(parameters)}
        with _recorded_linear_calls(network.eager) as calls:
            losses = network.sample_losses(batch, eager=True)
        require_graph(losses)
        candidates = [call for call in calls.values() if self._may_factor(call, batch)]
        if any(id(call.module) not in self._trusted for call in candidates):
            self._decide_trust(losses, candidates, position)
        factored = [call for call in candidates if self._trusted.get(id(call.module))]

        covered = {id(p) for call in factored for p in (call.module.weight, call.module.bias)}
        rest = [i for i, p in enumerate(parameters) if id(p) not in covered]
        found = torch.autograd.grad(
            losses,
            [*(call.outputs for call in factored), *(parameters[i] for i in rest)],
            torch.ones_like(losses),
            allow_unused=True,
        )
        gradients: list[Tensor | None] = [None] * len(parameters)
        squares: list[Tensor] = [p.new_zeros(()) for p in parameters]
        for call, delta in zip(factored, found, strict=False):
            for p, gradient, square in _factored(call, delta):
                if id(p) in position:
                    gradients[position[id(p)]] = gradient
                    squares[position[id(p)]] = square
        for i, gradient in zip(rest, found[len(factored) :], strict=True):
            gradients[i] = gradient
        losses = losses.detach()
        del found, calls, candidates, factored  # the graph, before more memory is taken
        if rest:
            for i, square in zip(rest, self._squares_by_vmap(batch, rest, memory), strict=True):
                squares[i] = square
        return losses, gradients, squares

    def _may_factor(self, call: _LinearCall, batch: Batch) -> bool:
        return (
            call.calls == 1
            and call.outputs._version == call.version
            and call.inputs.dim() == 2
            and call.inputs.shape[0] == batch.size
            and call.outputs.requires_grad
        )

    def _decide_trust(
        self, losses: Tensor, candidates: list[_LinearCall], position: dict[int, int]
    ) -> None:
        """Compare δᵀx with autograd's gradient, layer by layer."""
        tensors = self._network.parameters.tensors
        ones = torch.ones_like(losses)
        deltas = torch.autograd.grad(
            losses, [c.outputs for c in candidates], ones, retain_graph=True, allow_unused=True
        )
        exact: tuple[Tensor | None, ...] = torch.autograd.grad(
            losses, tensors, ones, retain_graph=True, allow_unused=True
        )
        for call, delta in zip(candidates, deltas, strict=True):
            fine = call.outputs.dtype in SUPPORTED_DTYPES
            tolerance = TRUST_TOLERANCE if fine else COARSE_TOLERANCE
            verdicts = []
            for p, gradient, _ in _factored(call, delta):
                if id(p) in position:
                    truth = exact[position[id(p)]]
                    truth = torch.zeros_like(p) if truth is None else truth
                    size = float(truth.norm())
                    error = float((truth - gradient).norm())
                    # A gradient of zero proves nothing: decide on a later batch.
                    verdicts.append(error <= tolerance * size if size or error else None)
            if all(verdict is not None for verdict in verdicts):
                self._trusted[id(call.module)] = all(verdicts)

    def _squares_by_vmap(self, batch: Batch, rest: list[int], memory: int) -> list[Tensor]:
        if self._vmap_works:
            try:
                return self._vmapped(batch, rest, memory)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as problem:
                self._vmap_works = False
                warnings.warn(
                    "the squared per-sample gradients of this model cannot be vectorised "
                    f"({first_line(problem)}); they are computed sample by sample, one backward "
                    'pass each: preconditioner="identity" avoids that cost',
                    stacklevel=2,
                )
        return self._one_by_one(batch, rest)

    def _vmapped(self, batch: Batch, rest: list[int], memory: int) -> list[Tensor]:
        network = self._network
        names = [network.names[i] for i in rest]
        tensors = tuple(network.parameters.tensors[i].detach() for i in rest)
        nest = (batch.inputs, batch.targets)

        def loss_of_one(values: tuple[Tensor, ...], *row: Tensor) -> Tensor:
            inputs, targets = replace_tensors(nest, [t.unsqueeze(0) for t in row])
            one = Batch(inputs, targets, 1)
            loss: Tensor = network.call_with(
                values, names, lambda: network.sample_losses(one, eager=True)
            )
            return loss[0]

        columns = tensors_in(nest)
        gradient = torch.vmap(torch.func.grad(loss_of_one), in_dims=(None, *(0 for _ in columns)))
        squares = [torch.zeros_like(tensor) for tensor in tensors]
        chunk = max(1, memory // sum(tensor.nbytes for tensor in tensors))
        # No graph towards the parameters that are not swapped; torch.func.grad makes its own.
        with torch.no_grad(), warnings.catch_warnings():
            # An operation without a batching rule is looped over inside: slower, not wrong.
            warnings.filterwarnings("ignore", message=".*performance drop.*")
            for start in range(0, batch.size, chunk):
                rows = gradient(tensors, *(column[start : start + chunk] for column in columns))
                for square, row in zip(squares, rows, strict=True):
                    square.add_(row.square().sum(0))
        return squares

    def _one_by_one(self, batch: Batch, rest: list[int]) -> list[Tensor]:
        tensors = [self._network.parameters.tensors[i] for i in rest]
        squares = [torch.zeros_like(tensor) for tensor in tensors]
        for i in range(batch.size):
            loss = self._network.sample_losses(batch.rows(i, i + 1), eager=True)
            row = torch.autograd.grad(loss.sum(), tensors, allow_unused=True)
            for square, gradient in zip(squares, row, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
        return squares


@contextmanager
def _recorded_linear_calls(model: nn.Module) -> Iterator[dict[int, _LinearCall]]:
    """What goes through each Linear layer, keyed by the layer's id."""
    calls: dict[int, _LinearCall] = {}

    def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if id(module) in calls:
            calls[id(module)].calls += 1
        elif isinstance(module, nn.Linear) and args:
            calls[id(module)] = _LinearCall(module, args[0].detach(), output, output._version)

    handles = [
        module.register_forward_hook(record)
        for module in model.modules()
        if type(module) is nn.Linear
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _factored(call: _LinearCall, delta: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(parameter, Σ gradient, Σ squared gradient) for weight and bias of one Linear layer."""
    if delta is None:
        return [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in call.module.parameters()]
    weight, bias = call.module.weight, call.module.bias
    x, delta = call.inputs.to(weight.dtype), delta.to(weight.dtype)
    squared = delta.square()
    found = [(weight, delta.t() @ x, squared.t() @ x.square())]
    if bias is not None:
        found.append((bias, delta.sum(0), squared.sum(0)))
    return found
