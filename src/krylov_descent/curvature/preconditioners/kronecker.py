"""D from the Kronecker factors of Linear layers (Martens & Grosse 2015, K-FAC).

The gradient of a sample towards the weights of a Linear layer is δxᵀ, with x the input of the layer
and δ the cotangent of its output. The Gauss-Newton matrix of the layer is close to the Kronecker
product of two small matrices. A has the second moments of x, extended by a 1 for the bias, and G
the second moments of δ. The inverse of the Kronecker product costs two small matrix products per
layer. A diagonal D ignores the correlations between the inputs of a layer. With Kronecker factors K
directions span what takes several times as many directions with a diagonal.

The damping is that of Martens and Grosse: (G + γ/π) ⊗ (A + γπ). γ² is ε times the largest block,
plus λ. π² is the ratio of the mean eigenvalues of A and G. Parameters that are not the weight or
bias of a Linear layer have the Fisher diagonal.
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

    Layers that are tied or used elsewhere in the graph of a step have the diagonal, too, and so
    have layers with more than 8,192 inputs or outputs. A and G are means over the set B of the
    step. Nothing is carried from step to step. G is a random sample of the curvature: its random
    signs depend on the position of a sample in its micro-batch. Other micro-batches, and samples
    spread over ranks, give another G, which is as good.

    Args:
        epsilon: ε, the damping relative to the largest block. `KSD(preconditioner="kronecker")`
            uses a tenth of its own ε. The least value in use is the machine epsilon of the dtype.
        after: how many steps KSD makes with the Fisher diagonal first (see
            `preconditioner_schedule`).

    Cost beyond the Fisher diagonal, for layers p × q: one gradient over B, (p² + q²)|B|
    multiplications, two Cholesky factorisations and inverses; for each vector of the basis
    pq(p + q) multiplications. Memory: 2(p² + q²) numbers, about twice that while the factors are
    made, and D times the basis, which is as large as the basis (see `MetricTimesBasis`).

    Raises:
        ValueError: `after` is negative.
    """

    def __init__(self, epsilon: float = 1e-5, *, after: int = 10) -> None:
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
        """Walk over A once for value, gradient and, if some parameter has no factors, squares."""
        samples = as_samples(data, may_be_empty=objective.ranks.together)
        self._squares = None
        if not self._needs_squares(objective, samples):
            return objective.value_and_gradient(samples)
        found = objective.value_gradient_and_squares(samples)
        self._squares = found.squares
        return found.without_squares()

    def _needs_squares(self, objective: Objective, samples: Samples) -> bool:
        """Whether some parameter has no factors, as far as that is known before the walk over A.

        The answer depends on the data in memory alone, not on earlier steps, so that a resumed run
        decides in the same way.
        """
        without = 1.0
        with objective.ranks.own_work():
            if isinstance(samples, InMemory) and samples.batch.size:
                objective.probe(samples.batch)
                covered = _covered(self.trusted_places(objective))
                without = float(len(covered) < len(objective.parameters.tensors))
            elif isinstance(samples, InMemory):  # a rank without samples has no vote
                without = 0.0
        return bool(objective.ranks.sum_numbers(torch.tensor([without], dtype=torch.float64)) > 0)

    def learn(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """Make the factors from this rank's samples of B."""
        self._parameters = objective.parameters
        objective.engine.launch(FactorsOfBatches(self, objective, batches)).result()
        self._squares = None

    def check(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """Raise ValueError if the loss's Hessian in the outputs has no root in closed form."""
        with objective.ranks.own_work():
            for batch in batches[:1]:
                self.form_in_outputs(objective, batch)

    def learn_from(self, objective: Objective, batches: Sequence[Batch]) -> None:
        """Make the factors batch by batch, summed over ranks."""
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
        # All ranks must decide in the same way. A rank without samples does not know which layers
        # to trust.
        numbers = torch.tensor([normaliser, *distrusted], dtype=torch.float64)
        normaliser, *distrusted = ranks.sum_numbers(numbers).tolist()
        sums = ranks.sum_vector(total).split([p.numbers for p in places])
        kept = [i for i, count in enumerate(distrusted) if not count]
        self.make_room([places[i] for i in kept], parameters)
        without = len(_covered([places[i] for i in kept])) < len(parameters.tensors)
        if without and self._squares is None:
            # In the graph of B, a layer that the probe trusted is used elsewhere, too.
            pairs = [(batch.inputs, batch.targets) for batch in batches]
            self._squares = objective.value_gradient_and_squares(pairs).squares
        own = [sums[i] for i in kept]
        self.make(own, total.new_tensor(normaliser), parameters, self._squares)

    def solve(self, vector: Tensor) -> Tensor:
        """G⁻¹VA⁻¹ of each layer, all other entries divided by the diagonal; a new vector [n]."""
        result = vector / self._diagonal
        self._apply(vector, result, inverse=True)
        return result

    def multiply(self, vector: Tensor) -> Tensor:
        """GVA of each layer, all other entries times the diagonal; a new vector [n]."""
        result = vector * self._diagonal
        self._apply(vector, result, inverse=False)
        return result

    def _apply(self, vector: Tensor, result: Tensor, *, inverse: bool) -> None:
        assert self._parameters is not None, "learn comes first"
        given, pieces = self._parameters.pieces(vector), self._parameters.pieces(result)
        with forward_precision():  # so that `multiply` is the inverse of `solve`
            jobs = [partial(b.apply, given, pieces, inverse=inverse) for b in self._blocks]
            operations().independent(jobs)

    # From samples to factors ------------------------------------------------------------------

    def form_in_outputs(self, objective: Objective, batch: Batch) -> Form:
        """The form of the loss's Hessian in the outputs, cached for the model once it is seen."""
        if self._form is None or self._form[0] is not objective.findings:
            outputs = objective.network.outputs(batch, eager=True)
            hessian = objective.network.output_hessian(outputs, batch)
            found = form_of(hessian, floating_tensors_in(outputs))
            if found is None:  # zero, or NaN, which the step reports: any form will do
                return "diagonal"
            self._form = objective.findings, found
        return self._form[1]

    def trusted_places(self, objective: Objective) -> list[LinearPlace]:
        """The layers that have factors, cached for the model."""
        if self._places is None or self._places[0] is not objective.findings:
            self._places = objective.findings, trusted_places(objective.network)
        return self._places[1]

    def make_room(self, places: list[LinearPlace], parameters: FlatParameters) -> None:
        """Allocate D. Later steps reuse its tensors while sizes, dtype and device stay the same."""
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
        """Compute D in the allocated tensors, scaled to a largest block or entry of about 1.

        The host does not wait for the device.

        Args:
            sums: for each layer that has factors, the moments by `sums_of`; overwritten.
            normaliser: how many samples the sums count for.
            parameters: of the model.
            squares: mean squared gradients [n] if some parameter has no factors; overwritten.
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
            # The longest jobs first, so that none of them is left for the end.
            jobs.sort(key=itemgetter(0), reverse=True)
            operations().independent(job for _, job in jobs)

    def _scale_rest(
        self,
        squares: Tensor,
        places: list[LinearPlace],
        means: list[tuple[Tensor, Tensor]],
        parameters: FlatParameters,
    ) -> list[Tensor]:
        """Scale the diagonal [n] to the units of the factors, in place.

        Squared gradients have other units than the curvature if the loss is not a likelihood, and
        they are smaller if the model is right. Layers with factors have both. The ratio of the
        traces of both converts squared gradients to curvature.

        Returns:
            The largest entry of each parameter that has no factors.
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
    """The work of making Kronecker factors from this rank's batches of B."""

    factors: KroneckerFactors
    objective: Objective
    batches: Sequence[Batch]

    def run(self) -> None:
        """Make the factors, batch by batch."""
        self.factors.learn_from(self.objective, self.batches)


def _covered(places: list[LinearPlace]) -> set[int]:
    """The indices of the parameters that have factors."""
    return {i for place in places for i in (place.weight, place.bias) if i is not None}
