"""D from the Kronecker factors of Linear layers (Martens & Grosse 2015, K-FAC).

A sample's gradient towards the weights of a Linear layer is δxᵀ, and the Gauss-Newton matrix of the
layer is near the Kronecker product of two small matrices: the second moments A of what goes into
the layer, x with a 1 for the bias, and G of what comes back, δ. Its inverse costs two small
products a layer. A diagonal knows nothing of how inputs of a layer are correlated; here K
directions span what takes several times as many with one.

Damping is that of Martens and Grosse: (G + γ/π) ⊗ (A + γπ), with γ² = ε times the largest block,
and λ, and π² the ratio of mean eigenvalues. What is not the weight or bias of a Linear layer has
the Fisher diagonal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from krylov_descent.batches import Batch, InMemory, Samples, as_samples
from krylov_descent.double_backward import floating
from krylov_descent.layer_moments import LinearPlace, linear_places, means_of, sums_of
from krylov_descent.linear_layers import side_by_side
from krylov_descent.network import Network
from krylov_descent.objective import Objective
from krylov_descent.output_root import Form, form_of
from krylov_descent.parameters import FlatParameters
from krylov_descent.precision import forward_precision
from krylov_descent.probes import Findings
from krylov_descent.sums import Evaluation


@dataclass(frozen=True, slots=True)
class _Block:
    """D of one layer, with the factors A and G, damped, and their inverses."""

    place: LinearPlace
    of_inputs: Tensor
    of_outputs: Tensor
    inverse_of_inputs: Tensor
    inverse_of_outputs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.of_inputs, self.of_outputs, self.inverse_of_inputs, self.inverse_of_outputs

    def fill(self, A: Tensor, G: Tensor, gamma: Tensor) -> None:
        """In place, by way of a Cholesky factor L: the inverse is L⁻ᵀL⁻¹."""
        # Of a layer that nothing goes into, or comes back to, any π will do.
        ratio = (A.trace() / len(A)) / (G.trace() / len(G))
        pi = torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0).sqrt()
        for factor, held, inverse, damping in (
            (A, self.of_inputs, self.inverse_of_inputs, gamma * pi),
            (G, self.of_outputs, self.inverse_of_outputs, gamma / pi),
        ):
            held.copy_(factor)
            held.diagonal().add_(damping)
            lower = torch.linalg.cholesky_ex(held)[0]
            eye = torch.eye(len(held), dtype=held.dtype, device=held.device)
            root = torch.linalg.solve_triangular(lower, eye, upper=False)
            torch.mm(root.t(), root, out=inverse)


class KroneckerFactors:
    """D = (G + γ/π) ⊗ (A + γπ) for each Linear layer, the Fisher diagonal for everything else.

    Layers that are tied or used elsewhere, or have more than 8,192 inputs or outputs, have the
    diagonal, too. A and G are means over the set B of the step, so that nothing is carried from
    step to step. G is a sample of the curvature, with random signs that go by the place of a sample
    in its micro-batch: other micro-batches, and samples spread over ranks, give another, as good.

    Args:
        epsilon: damping relative to the largest block, ε. `KSD(preconditioner="kronecker")` takes a
            tenth of its own. Too small to be felt in a dtype it is made larger.

    Cost beyond the Fisher diagonal, for layers p × q: one gradient over B, (p² + q²)|B|
    multiplications, two Cholesky factorisations and inverses; for each vector of the basis
    2pq(p + q) multiplications. Memory: 2(p² + q²) numbers, twice that while they are made.
    """

    def __init__(self, epsilon: float = 1e-5) -> None:
        self._epsilon = epsilon
        self._squares: Tensor | None = None
        self._diagonal = torch.empty(0)
        self._blocks: list[_Block] = []
        self._parameters: FlatParameters | None = None
        self._form: tuple[Findings, Form] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The diagonal and all factors."""
        return self._diagonal, *(t for block in self._blocks for t in block.tensors)

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """One walk over A for value, gradient and, where not all is factors, squares."""
        samples = as_samples(data, may_be_empty=objective.ranks.together)
        self._squares = None
        if not self._needs_squares(objective, samples):
            return objective.value_and_gradient(samples)
        found = objective.value_gradient_and_squares(samples)
        self._squares = found.squares
        return replace(found, squares=found.squares.new_empty(0))

    def _needs_squares(self, objective: Objective, samples: Samples) -> bool:
        """Whether some parameter has no factors, as far as that is known before the walk over A.

        By the data in memory alone, not by what earlier steps saw: a resumed run decides alike.
        """
        without = 1.0
        with objective.ranks.own_work():
            if isinstance(samples, InMemory) and samples.batch.size:
                objective.probe(samples.batch)
                trusted = objective.network.trusted_layers
                places = [p for p in linear_places(objective.network) if p.name in trusted]
                without = float(len(_covered(places)) < len(objective.parameters.tensors))
                # On a GPU the gradient of a small model is recorded together with its squares.
                without = max(without, float(objective.recordings.possible))
            elif isinstance(samples, InMemory):  # a rank without samples has no say
                without = 0.0
        return bool(objective.ranks.sum_numbers(torch.tensor([without], dtype=torch.float64)) > 0)

    def learn(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """The factors, from this rank's samples of B."""
        parameters, ranks = objective.parameters, objective.ranks
        self._parameters = parameters
        places = linear_places(objective.network)
        total = parameters.tensors[0].new_zeros(sum(place.numbers for place in places))
        normaliser, distrusted = 0.0, [0.0] * len(places)
        with ranks.own_work():
            for batch in batches:
                total += self._sums(objective, batch, places, alone=len(batches) == 1)
                normaliser += float(objective.network.loss.normaliser(batch.targets, batch.size))
            if batches:
                trusted = objective.network.trusted_layers
                distrusted = [float(place.name not in trusted) for place in places]
        # All ranks decide alike: also one without samples, which does not know what to trust.
        numbers = torch.tensor([normaliser, *distrusted], dtype=torch.float64)
        normaliser, *distrusted = ranks.sum_numbers(numbers).tolist()
        sums = ranks.sum_vector(total).split([place.numbers for place in places])
        kept = [i for i, count in enumerate(distrusted) if not count]
        means = [means_of(sums[i], places[i], normaliser) for i in kept]
        self._make([places[i] for i in kept], means, parameters)
        self._squares = None

    def solve(self, vector: Tensor) -> Tensor:
        """G⁻¹VA⁻¹ of each layer, the rest divided by the diagonal."""
        result = vector / self._diagonal
        self._apply(vector, result, inverse=True)
        return result

    def multiply(self, vector: Tensor) -> Tensor:
        """GVA of each layer, the rest times the diagonal."""
        result = vector * self._diagonal
        self._apply(vector, result, inverse=False)
        return result

    def _apply(self, vector: Tensor, result: Tensor, *, inverse: bool) -> None:
        assert self._parameters is not None, "learn comes first"
        given, pieces = self._parameters.pieces(vector), self._parameters.pieces(result)

        def apply(block: _Block) -> None:
            place = block.place
            matrix = given[place.weight]
            if place.bias is not None:
                matrix = torch.cat([matrix, given[place.bias].unsqueeze(1)], 1)
            left, right = block.of_outputs, block.of_inputs
            if inverse:
                left, right = block.inverse_of_outputs, block.inverse_of_inputs
            matrix = left @ matrix @ right
            pieces[place.weight].copy_(matrix[:, : pieces[place.weight].shape[1]])
            if place.bias is not None:
                pieces[place.bias].copy_(matrix[:, -1])

        with forward_precision():  # one is to be the other's inverse
            side_by_side([partial(apply, block) for block in self._blocks])

    # From samples to factors ------------------------------------------------------------------

    def _sums(
        self, objective: Objective, batch: Batch, places: list[LinearPlace], *, alone: bool
    ) -> Tensor:
        """Of a batch, what the factors are made of."""
        form = self._form_in_outputs(objective, batch)

        def sums(network: Network, batch: Batch) -> Tensor:
            return sums_of(network, batch, places, form)

        recording = None
        if alone and objective.recordings.possible and objective.may_record(batch):
            recording = objective.recordings.load("factors", sums, batch)
        found: Tensor = sums(objective.network, batch) if recording is None else recording()
        return found

    def _form_in_outputs(self, objective: Objective, batch: Batch) -> Form:
        """Of the loss's curvature in the outputs; asked until it is seen, and then once a model."""
        if self._form is None or self._form[0] is not objective.findings:
            outputs = objective.network.outputs(batch, eager=True)
            hessian = objective.network.output_hessian(outputs, batch)
            found = form_of(hessian, floating(outputs))
            if found is None:  # no curvature, or NaN, which the step will tell: any form will do
                return "diagonal"
            self._form = objective.findings, found
        return self._form[1]

    def _make(
        self,
        places: list[LinearPlace],
        means: list[tuple[Tensor, Tensor]],
        parameters: FlatParameters,
    ) -> None:
        """D out of factors and squares, scaled to a largest block or entry of about 1.

        Without a stop for the host.
        """
        blocks = [A.norm() * G.norm() for A, G in means]
        diagonal, largest = self._rest(places, means, parameters)
        scale = torch.stack([*blocks, *largest] or [diagonal.new_zeros(())]).max()
        one = torch.ones_like(scale)
        epsilon = max(self._epsilon, torch.finfo(one.dtype).eps)
        floor = torch.where(scale > 0, epsilon * one, one)
        scale = torch.where(scale > 0, scale, one)
        diagonal = diagonal.div_(scale).clamp_(min=floor) if largest else diagonal.fill_(1)
        # In place where that is possible: recorded kernels look for them there.
        kinds = [(t.shape, t.dtype, t.device) for t in (self._diagonal, diagonal)]
        if kinds[0] != kinds[1]:
            self._diagonal = torch.empty_like(diagonal)
        self._diagonal.copy_(diagonal)
        held = [(b.place, b.of_inputs.dtype, b.of_inputs.device) for b in self._blocks]
        if held != [(place, one.dtype, one.device) for place in places]:
            self._blocks = [
                _Block(place, *(torch.empty_like(m) for m in (A, G, A, G)))
                for place, (A, G) in zip(places, means, strict=True)
            ]
        with forward_precision():
            for block, (A, G) in zip(self._blocks, means, strict=True):
                decay = parameters.weight_decay[block.place.weight]
                block.fill(A / scale.sqrt(), G / scale.sqrt(), (epsilon + decay / scale).sqrt())

    def _rest(
        self,
        places: list[LinearPlace],
        means: list[tuple[Tensor, Tensor]],
        parameters: FlatParameters,
    ) -> tuple[Tensor, list[Tensor]]:
        """The diagonal [n], in the units of the factors, and the largest entries that count.

        Squares of gradients are in other units than the curvature, where the loss is not a
        likelihood, and smaller where the model is right. Both are known of the layers that have
        factors, and the ratio of their traces makes one out of the other.
        """
        if self._squares is None:
            return parameters.empty(), []
        pieces, covered = parameters.pieces(self._squares), _covered(places)
        if means:
            curvature = torch.stack([A.trace() * G.trace() for A, G in means]).sum()
            squares = torch.stack([pieces[i].sum() for i in sorted(covered)]).sum()
            ratio = curvature / squares
            self._squares.mul_(torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0))
        parameters.add_decay_constant(self._squares)
        rest = [i for i, piece in enumerate(pieces) if i not in covered and piece.numel()]
        return self._squares, [pieces[i].max() for i in rest]


def _covered(places: list[LinearPlace]) -> set[int]:
    """The parameters that have factors."""
    return {i for place in places for i in (place.weight, place.bias) if i is not None}
