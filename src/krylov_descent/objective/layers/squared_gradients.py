"""Sums of squared per-sample gradients, for the Fisher diagonal (paper, Section 4).

The result is Σᵢ (∂nᵢ/∂θ)², with the square inside the sum; it is not the square of the gradient.
There are two routes:

1. Linear layers are exact, from inputs x and cotangents δ of the outputs. With one row per sample
   ∂nᵢ/∂W = δᵢxᵢᵀ, so the squares factor: Σᵢ (δᵢxᵢᵀ)² = (δ²)ᵀ(x²), one more matrix product.
   With several rows per sample (the steps of a sequence, a recurrent layer called once per step)
   ∂nᵢ/∂W is the sum of δxᵀ over the sample's rows, one matrix product per sample. A layer must
   pass the check of `layer_trust` in every graph. On a first batch, δᵀx must agree with autograd's
   gradient, and row i of δ must depend on loss i only. The latter fails if dimension 0 is time.
2. All other parameters have an unbiased estimate by random signs. The samples are dealt out to
   `GROUPS` groups G, and each sample gets a sign sᵢ = ±1: Σᵢ gᵢ² ≈ Σ_G (Σ_{i∈G} sᵢgᵢ)². The mean
   over signs is exact, because sᵢsⱼ has mean 0. An entry of many samples has a relative standard
   deviation of about √(2/GROUPS) = 0.5, the noise of GROUPS draws of signs for all samples. Those
   would take as many backward passes over all samples; the groups together are one forward and one
   backward pass over the samples. Batches of at most GROUPS samples are exact.

The N×n per-sample gradients are never held all at once.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Batch
from krylov_descent.objective.layers.layer_trust import agrees, trust_tolerance, used_nowhere_else
from krylov_descent.objective.layers.linear_layers import LinearLayer, recorded_linear_layers
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.network import Network, require_graph
from krylov_descent.runtime.ops import operations
from krylov_descent.runtime.precision import epsilon_of
from krylov_descent.runtime.random_signs import signs_like

# Whether a layer takes route 1 is decided on this many samples.
TRUST_SAMPLES = 32
# A chunk of per-sample gradients may take 1/CHUNK_PART of the memory for activations.
CHUNK_PART = 8
# Route 2 adds up the gradients of this many groups of samples.
GROUPS = 8


class SquaredGradients:
    """Sums of squared per-sample gradients of a network, one batch at a time.

    Attributes:
        settled: whether the last batch left no layer for which the use of route 1 is undecided.

    Cost of `of_batch`: one gradient, plus one third of it for layers of route 1, plus one gradient,
    in GROUPS passes, if there are parameters of route 2.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.forget()

    def forget(self) -> None:
        """Discard all decisions about routes, because the model has changed."""
        self._trusted: dict[str, bool] = {}  # by the names of the layers
        self.settled = False

    def on(self, network: Network) -> "SquaredGradients":
        """A copy for `network`, which has aliases of the parameters. It shares the decisions."""
        other = copy.copy(self)
        other._network = network
        return other

    def of_batch(
        self, batch: Batch, memory: int
    ) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
        """Losses [m], Σ gradients and Σ squared gradients, one of each sum per parameter.

        A gradient is None if the losses do not depend on the parameter.

        Args:
            batch: m samples.
            memory: bytes for activations; an eighth of it is for per-sample gradients.

        Raises:
            ValueError: the losses depend on no trainable parameter.
        """
        network = self._network
        parameters = network.parameters.tensors
        held = network.original.parameters.tensors  # by the modules
        position = {id(p): i for i, p in enumerate(held)}
        losses, candidates = self._losses_and_candidates(batch, position)
        names = self._names()
        if any(names[id(layer.module)] not in self._trusted for layer in candidates):
            self._decide_trust(batch.spread(TRUST_SAMPLES), position, memory)
        self.settled = all(names[id(layer.module)] in self._trusted for layer in candidates)
        factored = [layer for layer in candidates if self._trusted.get(names[id(layer.module)])]

        covered = {id(p) for layer in factored for p in (layer.module.weight, layer.module.bias)}
        rest = [
            i for i, p in enumerate(network.original.parameters.tensors) if id(p) not in covered
        ]
        outputs = [y for layer in factored for y in layer.outputs]
        found = torch.autograd.grad(
            losses,
            [*outputs, *(parameters[i] for i in rest)],
            operations().ones(losses),
            allow_unused=True,
        )
        losses = losses.detach()
        gradients: list[Tensor | None] = [None] * len(parameters)
        squares: list[Tensor | None] = [None] * len(parameters)
        for i, gradient in zip(rest, found[len(outputs) :], strict=True):
            gradients[i] = gradient
        deltas: list[Tensor | None] = list(found[: len(outputs)])
        del found, outputs, candidates
        for of_layer in operations().independent(_jobs(factored, deltas, memory)):
            for p, gradient, square in of_layer:
                if id(p) in position:
                    gradients[position[id(p)]] = gradient
                    squares[position[id(p)]] = square
        if rest:
            for i, square in zip(rest, self._by_signs(batch, rest), strict=True):
                squares[i] = square
        known = (
            p.new_zeros(()) if s is None else s for p, s in zip(parameters, squares, strict=True)
        )
        return losses, gradients, list(known)

    def _names(self) -> dict[int, str]:
        """The names of the modules of now, by id."""
        return {id(module): name for name, module in self._network.eager.named_modules()}

    def _losses_and_candidates(
        self, batch: Batch, position: dict[int, int]
    ) -> tuple[Tensor, list[LinearLayer]]:
        """Losses [m] in the autograd graph, and the trained layers that may take route 1."""
        with recorded_linear_layers(self._network.eager) as layers:
            losses = self._network.sample_losses(batch, eager=True)
        require_graph(losses)
        self._network.check_leaves([losses])
        trained = [
            layer
            for layer in layers
            if {id(layer.module.weight), id(layer.module.bias)} & position.keys()
            and _has_rows(layer, batch.size)
        ]
        # Checked in every graph: a weight may be used elsewhere at some steps or by some samples.
        return losses, used_nowhere_else([losses], trained)

    def _decide_trust(self, few: Batch, position: dict[int, int], memory: int) -> None:
        """Decide for each layer whether route 1 is valid.

        The gradients of route 1 must agree with autograd's, and weighting the losses must scale
        each sample's δ by the sample's weight. Few samples are used, because the δ of all calls
        are held twice.
        """
        losses, candidates = self._losses_and_candidates(few, position)
        names = self._names()
        tensors = self._network.parameters.tensors
        outputs = [y for layer in candidates for y in layer.outputs]
        ones = torch.ones_like(losses)
        weights = torch.linspace(1, 2, len(losses), dtype=losses.dtype, device=losses.device)
        deltas, weighted, exact = (
            torch.autograd.grad(losses, of, by, retain_graph=True, allow_unused=True)
            for of, by in ((outputs, ones), (outputs, weights), (tensors, ones))
        )
        start = 0
        for layer in candidates:
            here = slice(start, start := start + len(layer.outputs))
            epsilon = epsilon_of(layer.outputs[0].dtype, losses.device)
            own = _own_samples(deltas[here], weighted[here], weights, trust_tolerance(epsilon))
            factored = _factored(layer, deltas[here], memory)
            known = [(p, gradient) for p, gradient, _ in factored if id(p) in position]
            verdict = agrees([(found, exact[position[id(p)]]) for p, found in known], epsilon)
            if verdict is not None:  # otherwise a later batch decides
                self._trusted[names[id(layer.module)]] = own and verdict

    def _by_signs(self, batch: Batch, rest: list[int]) -> list[Tensor]:
        """An unbiased estimate of the Σ squared gradients of some parameters."""
        tensors = [self._network.parameters.tensors[i] for i in rest]
        squares = [torch.zeros_like(tensor) for tensor in tensors]
        # Groups have signs of their own, as samples of different groups may be alike.
        (signs,) = signs_like([tensors[0].new_empty(batch.size)])
        count = min(GROUPS, batch.size)
        for first in range(count):
            losses = self._network.sample_losses(batch.every(count, first), eager=True)
            own = signs[first::count].to(losses.dtype)
            row = torch.autograd.grad(losses, tensors, own, allow_unused=True)
            for square, gradient in zip(squares, row, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
        return squares


def _has_rows(layer: LinearLayer, samples: int) -> bool:
    """Whether dimension 0 of every input has one entry per sample."""
    return all(x.dim() > 1 and len(x) == samples for x in layer.inputs)


def _own_samples(
    deltas: Sequence[Tensor | None],
    weighted: Sequence[Tensor | None],
    weights: Tensor,
    tolerance: float,
) -> bool:
    """Whether δ of sample i scales with the weight of loss i, and depends on no other loss."""
    for delta, other in zip(deltas, weighted, strict=True):
        if delta is not None and other is not None:
            scaled = delta * weights.to(delta.dtype).view(-1, *(1,) * (delta.dim() - 1))
            if not length(scaled - other) <= tolerance * length(other):
                return False
    return True


def _jobs(
    layers: list[LinearLayer], deltas: list[Tensor | None], memory: int
) -> Iterator[Callable[[], list[tuple[Tensor, Tensor, Tensor]]]]:
    """One call of `_factored` per layer. A layer's x and δ are freed together with its job.

    Args:
        layers: emptied.
        deltas: δ of all calls of all layers, in order; emptied.
        memory: bytes for activations.
    """
    while layers:
        layer = layers.pop(0)
        own = [deltas.pop(0) for _ in layer.outputs]
        layer.outputs.clear()
        yield partial(_factored, layer, own, memory)


def _factored(
    layer: LinearLayer, deltas: Sequence[Tensor | None], memory: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(parameter, Σ gradient, Σ squared gradient) for weight and bias of one Linear layer."""
    weight, bias = layer.module.weight, layer.module.bias
    calls = [
        (x.to(weight.dtype), delta.to(weight.dtype))
        for x, delta in zip(layer.inputs, deltas, strict=True)
        if delta is not None
    ]
    if not calls:
        return [(p, torch.zeros_like(p), torch.zeros_like(p)) for p in layer.module.parameters()]
    if len(calls) == 1 and calls[0][0].dim() == 2:
        x, delta = calls[0]
        of_weight, weight_squares, of_bias, bias_squares = operations().sums_over_samples(x, delta)
        found = [(weight, of_weight, weight_squares)]
        if bias is not None:
            found.append((bias, of_bias, bias_squares))
        return found
    return _by_products_per_sample(layer.module, calls, memory)


def _by_products_per_sample(
    module: nn.Linear, calls: list[tuple[Tensor, Tensor]], memory: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """`_factored` for several rows per sample: computes per-sample gradients in chunks."""
    weight = module.weight
    found = [(weight, torch.zeros_like(weight), torch.zeros_like(weight))]
    if module.bias is not None:
        found.append((module.bias, torch.zeros_like(module.bias), torch.zeros_like(module.bias)))
    samples = calls[0][0].shape[0]
    numbers = weight.numel() + sum(x.numel() + delta.numel() for x, delta in calls) // samples
    chunk = max(1, memory // CHUNK_PART // (weight.element_size() * numbers))
    for start in range(0, samples, chunk):
        pieces = [(x[start : start + chunk], delta[start : start + chunk]) for x, delta in calls]
        # [chunk, rows, in] and [chunk, rows, out]
        x = torch.cat([x.reshape(len(x), -1, x.shape[-1]) for x, _ in pieces], 1)
        delta = torch.cat([d.reshape(len(d), -1, d.shape[-1]) for _, d in pieces], 1)
        for (_, gradient, square), rows in zip(
            found, (delta.transpose(1, 2) @ x, delta.sum(1)), strict=False
        ):
            gradient.add_(rows.sum(0))
            square.add_(rows.square_().sum(0))
    return found
