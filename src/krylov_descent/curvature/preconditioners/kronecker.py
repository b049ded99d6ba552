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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from krylov_descent.curvature.preconditioners.kronecker_block import Block
from krylov_descent.curvature.preconditioners.layer_moments import (
    LinearPlace,
    linear_places,
    means_of,
    sums_of,
    trusted_places,
)
from krylov_descent.curvature.preconditioners.output_root import Form, form_of
from krylov_descent.objective.batches import (
    Batch,
    InMemory,
    Samples,
    as_samples,
    floating_tensors_in,
)
from krylov_descent.objective.contract_probe import Findings
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.runtime.ops import operations
from krylov_descent.runtime.precision import forward_precision
from krylov_descent.runtime.validation import check_whole


class KroneckerFactors:
    """D = (G + γ/π) ⊗ (A + γπ) for each Linear layer, the Fisher diagonal for everything else.

    Layers that are tied or used elsewhere in the graph of a step, or have more than 8,192 inputs or
    outputs, have the diagonal, too. A and G are means over the set B of the step, so that nothing
    is carried from step to step. G is a sample of the curvature, with random signs that go by the
    place of a sample in its micro-batch: other micro-batches, and samples spread over ranks, give
    another, as good.

    Args:
        epsilon: damping relative to the largest block, ε. `KSD(preconditioner="kronecker")` takes a
            tenth of its own. Too small to be felt in a dtype it is made larger.
        after: how many steps KSD makes with the Fisher diagonal first (see
            `preconditioner_schedule`).

    Cost beyond the Fisher diagonal, for layers p × q: one gradient over B, (p² + q²)|B|
    multiplications, two Cholesky factorisations and inverses; for each vector of the basis
    pq(p + q) multiplications. Memory: 2(p² + q²) numbers, about twice that while they are made, and
    D times the basis, as much as the basis itself (see `Images`).
    """

    def __init__(self, epsilon: float = 1e-5, *, after: int = 20) -> None:
        check_whole(after=after)
        if after < 0:
            raise ValueError(f"`after` must be at least 0, found {after}")
        self.epsilon = epsilon
        self.after = after
        self._squares: Tensor | None = None
        self._diagonal = torch.empty(0)
        self._blocks: list[Block] = []
        self._parameters: FlatParameters | None = None
        self._form: tuple[Findings, Form] | None = None
        self._places: tuple[Findings, list[LinearPlace]] | None = None

    def __repr__(self) -> str:
        return f"KroneckerFactors({self.epsilon:g}, after={self.after})"

    @property
    def squares(self) -> Tensor | None:
        """Mean squared gradients on A [n], until the factors are made; None if not needed."""
        return self._squares

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
        return found.without_squares()

    def _needs_squares(self, objective: Objective, samples: Samples) -> bool:
        """Whether some parameter has no factors, as far as that is known before the walk over A.

        By the data in memory alone, not by what earlier steps saw: a resumed run decides alike.
        """
        without = 1.0
        with objective.ranks.own_work():
            if isinstance(samples, InMemory) and samples.batch.size:
                objective.probe(samples.batch)
                covered = _covered(self.trusted_places(objective))
                without = float(len(covered) < len(objective.parameters.tensors))
            elif isinstance(samples, InMemory):  # a rank without samples has no say
                without = 0.0
        return bool(objective.ranks.sum_numbers(torch.tensor([without], dtype=torch.float64)) > 0)

    def learn(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """The factors, from this rank's samples of B."""
        self._parameters = objective.parameters
        objective.engine.launch(FactorsOfBatches(self, objective, batches)).result()
        self._squares = None

    def check(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """Refuse a loss whose curvature has no root in closed form."""
        with objective.ranks.own_work():
            for batch in batches[:1]:
                self.form_in_outputs(objective, batch)

    def learn_from(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """The factors, batch by batch and summed over ranks."""
        parameters, ranks = objective.parameters, objective.ranks
        places = linear_places(objective.network)
        total = parameters.tensors[0].new_zeros(sum(place.numbers for place in places))
        normaliser, distrusted, left_out = 0.0, [0.0] * len(places), set[str]()
        with ranks.own_work():
            for batch in batches:
                form = self.form_in_outputs(objective, batch)
                found = sums_of(objective.network, batch, places, form)
                total += found.moments
                left_out |= found.left_out
                normaliser += float(objective.network.loss.normaliser(batch.targets, batch.size))
            if batches:
                trusted = objective.network.trusted_layers - left_out
                distrusted = [float(place.name not in trusted) for place in places]
        # All ranks decide alike: also one without samples, which does not know what to trust.
        numbers = torch.tensor([normaliser, *distrusted], dtype=torch.float64)
        normaliser, *distrusted = ranks.sum_numbers(numbers).tolist()
        sums = ranks.sum_vector(total).split([p.numbers for p in places])
        kept = [i for i, count in enumerate(distrusted) if not count]
        self.make_room([places[i] for i in kept], parameters)
        without = len(_covered([places[i] for i in kept])) < len(parameters.tensors)
        if without and self._squares is None:
            # A layer that the probe trusted is used elsewhere in the graph of B.
            pairs = [(batch.inputs, batch.targets) for batch in batches]
            self._squares = objective.value_gradient_and_squares(pairs).squares
        own = [sums[i] for i in kept]
        self.make(own, total.new_tensor(normaliser), parameters, self._squares)

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
        with forward_precision():  # one is to be the other's inverse
            jobs = [partial(b.apply, given, pieces, inverse=inverse) for b in self._blocks]
            operations().independent(jobs)

    # From samples to factors ------------------------------------------------------------------

    def form_in_outputs(self, objective: Objective, batch: Batch) -> Form:
        """Of the loss's curvature in the outputs; asked until it is seen, and then once a model."""
        if self._form is None or self._form[0] is not objective.findings:
            outputs = objective.network.outputs(batch, eager=True)
            hessian = objective.network.output_hessian(outputs, batch)
            found = form_of(hessian, floating_tensors_in(outputs))
            if found is None:  # no curvature, or NaN, which the step will tell: any form will do
                return "diagonal"
            self._form = objective.findings, found
        return self._form[1]

    def trusted_places(self, objective: Objective) -> list[LinearPlace]:
        """The layers that have factors; looked for once a model."""
        if self._places is None or self._places[0] is not objective.findings:
            self._places = objective.findings, trusted_places(objective.network)
        return self._places[1]

    def make_room(self, places: list[LinearPlace], parameters: FlatParameters) -> None:
        """Room for D, in the same place at every step as long as it is of the same kind."""
        like = parameters.tensors[0]
        kind = parameters.numel, like.dtype, like.device
        if kind != (self._diagonal.numel(), self._diagonal.dtype, self._diagonal.device):
            self._diagonal = parameters.empty()
        if [block.place for block in self._blocks if block.is_like(like)] != places:
            self._blocks = [Block.empty(place, like) for place in places]

    def make(
        self,
        sums: Sequence[Tensor],
        normaliser: Tensor,
        parameters: FlatParameters,
        squares: Tensor | None = None,
    ) -> None:
        """D out of factors and squares, scaled to a largest block or entry of about 1.

        In the room that was made for it, and without a stop for the host.

        Args:
            sums: of each layer that has factors, as `sums_of` has them; overwritten.
            normaliser: how many samples they count for.
            parameters: of the model.
            squares: mean squared gradients [n], where some parameter has no factors; overwritten.
        """
        places = [block.place for block in self._blocks]
        means = [means_of(s, p, normaliser) for s, p in zip(sums, places, strict=True)]
        sizes = [A.norm() * G.norm() for A, G in means]
        if squares is not None:
            sizes += self._scale_rest(squares, places, means, parameters)
        scale = torch.stack(sizes or [normaliser.new_zeros(())]).max()
        one = torch.ones_like(scale)
        epsilon = max(self.epsilon, torch.finfo(one.dtype).eps)
        floor = torch.where(scale > 0, epsilon * one, one)
        scale = torch.where(scale > 0, scale, one)
        if squares is None:
            self._diagonal.fill_(1)
        else:
            torch.clamp(squares.div_(scale), min=floor, out=self._diagonal)
        with forward_precision():
            jobs = list[tuple[int, Callable[[], None]]]()
            for block, (A, G) in zip(self._blocks, means, strict=True):
                decay = parameters.weight_decay[block.place.weight]
                gamma = (epsilon + decay / scale).sqrt()
                jobs += block.filling(A, G, gamma, scale.sqrt())
            # The longest first, so that none of them is left for the end.
            jobs.sort(key=itemgetter(0), reverse=True)
            operations().independent(job for _, job in jobs)

    def _scale_rest(
        self,
        squares: Tensor,
        places: list[LinearPlace],
        means: list[tuple[Tensor, Tensor]],
        parameters: FlatParameters,
    ) -> list[Tensor]:
        """The diagonal [n] in the units of the factors, in place; its largest entries that count.

        Squares of gradients are in other units than the curvature, where the loss is not a
        likelihood, and smaller where the model is right. Both are known of the layers that have
        factors, and the ratio of their traces makes one out of the other.
        """
        pieces, covered = parameters.pieces(squares), _covered(places)
        if means:
            curvature = torch.stack([A.trace() * G.trace() for A, G in means]).sum()
            known = torch.stack([pieces[i].sum() for i in sorted(covered)]).sum()
            ratio = curvature / known
            squares.mul_(torch.where((ratio > 0) & ratio.isfinite(), ratio, 1.0))
        parameters.add_decay_constant(squares)
        rest = [i for i, piece in enumerate(pieces) if i not in covered and piece.numel()]
        return [pieces[i].max() for i in rest]


@dataclass(frozen=True, slots=True)
class FactorsOfBatches:
    """The work of making Kronecker factors of this rank's batches of B."""

    factors: KroneckerFactors
    objective: Objective
    batches: Sequence[Batch]

    def run(self) -> None:
        """Make them, batch by batch."""
        self.factors.learn_from(self.objective, self.batches)


def _covered(places: list[LinearPlace]) -> set[int]:
    """The parameters that have factors."""
    return {i for place in places for i in (place.weight, place.bias) if i is not None}
