"""D from the Kronecker factors of Linear layers (Martens & Grosse 2015, K-FAC).

A sample's gradient towards the weights of a Linear layer is δxᵀ, and the Gauss-Newton matrix of the
layer is near the Kronecker product of two small matrices: the second moments A of what goes into
the layer, x with a 1 for the bias, and G of what comes back, δ. Its inverse costs two small
products a layer. A diagonal knows nothing of how inputs of a layer are correlated; here K
directions span what takes several times as many with one.

Damping is that of Martens and Grosse: (G + γ/π) ⊗ (A + γπ), with γ² = ε times the largest block
and π² the ratio of mean eigenvalues. What is not the weight or bias of a Linear layer has the
Fisher diagonal.
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
from krylov_descent.output_root import is_diagonal
from krylov_descent.parameters import FlatParameters
from krylov_descent.precision import forward_precision
from krylov_descent.probes import PROBE_SAMPLES, Findings
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


class KroneckerFactors:
    """D = (G + γ/π) ⊗ (A + γπ) for each Linear layer, the Fisher diagonal for everything else.

    Layers that are tied or used elsewhere, or have more than 8,192 inputs or outputs, have the
    diagonal, too. A and G are means over the set B of the step, so that nothing is carried from
    step to step.

    Args:
        epsilon: damping relative to the largest block, ε.

    Cost beyond the Fisher diagonal, for layers p × q: one gradient over B, (p² + q²)|B|
    multiplications, two Cholesky factorisations and inverses; for each vector of the basis
    2pq(p + q) multiplications. Memory: 2(p² + q²) numbers, twice that while they are made.
    """

    def __init__(self, epsilon: float = 1e-4) -> None:
        self._epsilon = epsilon
        self._diagonal = torch.empty(0)
        self._blocks: list[_Block] = []
        self._sizes: list[int] = []
        self._shapes: list[torch.Size] = []
        self._is_diagonal: tuple[Findings, bool] | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The diagonal and all factors."""
        return self._diagonal, *(t for block in self._blocks for t in block.tensors)

    def update(self, objective: Objective, data: Any) -> Evaluation:
        """One walk over A for value, gradient and, where not all is factors, squares."""
        samples = as_samples(data, may_be_empty=objective.ranks.together)
        if self._needs_squares(objective, samples):
            found = objective.value_gradient_and_squares(samples)
            objective.parameters.add_decay_constant(found.squares)
            diagonal = found.squares
        else:
            found = objective.value_and_gradient(samples)
            diagonal = torch.ones_like(found.gradient)  # nobody's
        if self._diagonal.shape != diagonal.shape:
            self._diagonal = diagonal
        else:
            self._diagonal.copy_(diagonal)
        return replace(found, squares=found.gradient.new_empty(0))

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
                covered = {i for place in places for i in (place.weight, place.bias)}
                without = float(len(covered - {None}) < len(objective.parameters.tensors))
            elif isinstance(samples, InMemory):  # a rank without samples has no say
                without = 0.0
        return bool(objective.ranks.sum_numbers(torch.tensor([without], dtype=torch.float64)) > 0)

    def learn(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """The factors, from this rank's samples of B."""
        parameters, ranks = objective.parameters, objective.ranks
        self._sizes, self._shapes = parameters.sizes, [p.shape for p in parameters.tensors]
        places = linear_places(objective.network)
        total = parameters.tensors[0].new_zeros(sum(p.numbers for p in places) + len(places) + 1)
        with ranks.own_work():
            for batch in batches:
                total += self._sums(objective, batch, places)
        total = ranks.sum_vector(total)
        normaliser, distrusted, *sums = total.split([1, len(places), *(p.numbers for p in places)])
        # All ranks decide alike: also one without samples, which does not know what to trust.
        kept = [i for i, count in enumerate(distrusted.tolist()) if not count]
        means = [means_of(sums[i], places[i], normaliser) for i in kept]
        self._damp([places[i] for i in kept], means, parameters)

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
        given, pieces = self._pieces(vector), self._pieces(result)

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

    def _pieces(self, vector: Tensor) -> list[Tensor]:
        parts = vector.split(self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    # From samples to factors ------------------------------------------------------------------

    def _sums(self, objective: Objective, batch: Batch, places: list[LinearPlace]) -> Tensor:
        """Of a batch: the normaliser, one for each layer that is not trusted, sums for factors."""
        network = objective.network
        diagonal = self._diagonal_in_outputs(objective, batch)

        def sums(network: Network, batch: Batch) -> Tensor:
            return sums_of(network, batch, places, diagonal=diagonal)

        # Eigenvectors, which a loss without a diagonal needs, cannot be recorded.
        may_record = diagonal and objective.recordings.possible
        recording = objective.recordings.load("factors", sums, batch) if may_record else None
        found: Tensor = sums(network, batch) if recording is None else recording()
        normaliser = float(network.loss.normaliser(batch.targets, batch.size))
        flags = [float(place.name not in network.trusted_layers) for place in places]
        return torch.cat([found.new_tensor([normaliser, *flags]), found])

    def _diagonal_in_outputs(self, objective: Objective, batch: Batch) -> bool:
        """Whether the loss has a diagonal curvature in the outputs; asked once for a model."""
        if self._is_diagonal is None or self._is_diagonal[0] is not objective.findings:
            few = batch.rows(0, PROBE_SAMPLES)
            outputs = objective.network.outputs(few, eager=True)
            hessian = objective.network.output_hessian(outputs, few)
            found = is_diagonal(hessian, floating(outputs))
            if found is None:  # the step will say what is not finite
                return True
            self._is_diagonal = objective.findings, found
        return self._is_diagonal[1]

    def _damp(
        self,
        places: list[LinearPlace],
        means: list[tuple[Tensor, Tensor]],
        parameters: FlatParameters,
    ) -> None:
        """Scale to a largest block of about 1, damp, and invert; without a stop for the host."""
        covered = {i for place in places for i in (place.weight, place.bias)}
        rest = [
            piece.max()
            for i, piece in enumerate(parameters.pieces(self._diagonal))
            if i not in covered
        ]
        blocks = [A.norm() * G.norm() for A, G in means]
        scale = torch.stack(blocks + rest).max()
        one = torch.ones_like(scale)
        floor = torch.where(scale > 0, self._epsilon * one, one)
        scale = torch.where(scale > 0, scale, one)
        torch.clamp(self._diagonal.div_(scale), min=floor, out=self._diagonal)
        if [block.place for block in self._blocks] != places or any(
            t.device != scale.device or t.dtype != scale.dtype for t in self.tensors
        ):
            self._blocks = [
                _Block(p, *(torch.empty_like(m) for m in (A, G, A, G)))
                for p, (A, G) in zip(places, means, strict=True)
            ]

        def fill(block: _Block, A: Tensor, G: Tensor) -> None:
            root = scale.sqrt()
            A, G = A / root, G / root
            # Of a layer that nothing goes into, or comes back to, any π will do.
            ratio = (A.trace() / len(A)) / (G.trace() / len(G))
            pi = torch.where((ratio > 0) & ratio.isfinite(), ratio, one).sqrt()
            gamma = (self._epsilon + parameters.weight_decay[block.place.weight] / scale).sqrt()
            for factor, held, inverse, damping in (
                (A, block.of_inputs, block.inverse_of_inputs, gamma * pi),
                (G, block.of_outputs, block.inverse_of_outputs, gamma / pi),
            ):
                held.copy_(factor)
                held.diagonal().add_(damping)
                lower = torch.linalg.cholesky_ex(held)[0]
                eye = torch.eye(len(held), dtype=held.dtype, device=held.device)
                root_of_inverse = torch.linalg.solve_triangular(lower, eye, upper=False)
                torch.mm(root_of_inverse.t(), root_of_inverse, out=inverse)

        with forward_precision():
            for block, (A, G) in zip(self._blocks, means, strict=True):
                fill(block, A, G)
