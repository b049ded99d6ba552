"""Hessian-Free optimisation (Martens 2010, *Deep learning via Hessian-free optimization*)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from krylov_descent.algorithms.conjugate_gradient import (
    CGIterate,
    CGResult,
    CGStop,
    conjugate_gradient,
)
from krylov_descent.algorithms.damping import adapted_damping, reduction_ratio
from krylov_descent.curvature.products import Curvature, CurvatureKind
from krylov_descent.objective.batches import Nothing, Samples
from krylov_descent.objective.chunks import ChunkSize, check_chunk_size, chunk_length, cycled_chunk
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.network import Forward
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.term import LossOrTerms
from krylov_descent.objective.term_samples import TermSamples
from krylov_descent.optimizers.account import Account
from krylov_descent.optimizers.base import Closure, DataOptimizer
from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.runtime.precision import derivatives_in_tf32
from krylov_descent.runtime.process_group import ProcessGroup
from krylov_descent.runtime.validation import check_counts, check_flags

LAST_ITERATE = "last_iterate"  # of CG; another iterate may have been chosen as the step
START_DECAY = 0.95

PRECONDITIONER_POWER = 0.75

SUFFICIENT_DECREASE = 0.01
RATE_SHRINKAGE = 0.8
LINE_SEARCH_TRIALS = 60


class HessianFree(DataOptimizer):
    """Hessian-Free: truncated Newton steps by conjugate gradients, with adaptive damping.

    Each step minimises the damped quadratic gᵀd + ½ dᵀ(H + λI)d by preconditioned CG. It then goes
    back over the iterates of CG to the one that is best on all the data, and shortens that iterate
    by a line search. The damping λ of the next step depends on how well the quadratic predicted the
    change of the objective.

    Args:
        model: the module to train.
        loss: one of torch's losses, a callable `(outputs, targets) -> one number per sample`, or
            one that returns their mean; or a dict of `Term`s, which have their own samples.
        params: the parameters to train, as torch.optim takes them; all of the model's by default.
        curvature: "gauss-newton", "hessian" or "fisher". The method is made for matrices without
            negative curvature. CG stops where it meets negative curvature of the Hessian, and the
            iterates so far are used. If there are none, the step is refused and λ is raised, until
            the damped matrix is positive.
        damping: λ of the first step, in the units of the loss. The default is Martens' on CURVES,
            whose losses are sums over pixels.
        chunk_size: samples for the curvature: a number (Martens: 5,000 on CURVES, 7,500 on MNIST),
            a fraction of the data, or "auto" (a quarter of the data, at least 1,000). Each step
            takes the next chunk, and the chunks cycle through the data.
        cg_iterations: the most iterations of CG.
        weight_decay: λ of the L2 term ½λ‖θ‖², which is part of the objective.
        lr: scales the step; for schedulers. Leave it at 1.
        seed: of the random order in which the chunks are cut.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples processed at a time; by default as many as fit
            `activation_memory`.
        activation_memory: the most bytes for activations; by default 1 GiB on a CPU and a quarter
            of the free memory on a GPU.
        cuda_graphs: on a GPU, record products and evaluations once and replay them; False runs them
            eagerly.
        tf32: on a GPU, compute curvature products in TensorFloat-32: faster for large layers, with
            three digits. Gradient and forward passes keep torch's own setting. (The squares for the
            preconditioner may be in TensorFloat-32 in any case: see `precision.rough_products`.)
        process_group: the ranks that train together: a torch.distributed.ProcessGroup or a
            one-dimensional DeviceMesh; all processes by default.

    Under an initialised process group (`torchrun`) each rank passes its own part of the data to
    `step` and gets the result that one process would get on all of the data. Terms must be the same
    on every rank, with all their points; each rank computes its share.

    The quadratic has the gradient of all the data and the curvature of the chunk. The ratio ρ
    divides the change of the objective on all the data by the change of the quadratic.

    Cost of a step, in gradients over one sample: N·4/3 + (iterations of CG)·|chunk|·4/3 + N/3 for
    each value in backtracking and line search, of which there are at least two.

    Memory beyond the model, the data and activations: 12 vectors of n numbers, one of them kept
    between steps, and one for each iterate on CG's grid (16 for 250 iterations).

    Example:
        >>> optimizer = HessianFree(model, torch.nn.CrossEntropyLoss())
        >>> for _ in range(30):
        ...     print(optimizer.step((inputs, targets)))
    """

    data_parallel = True
    learnt = ("damping",)

    def __init__(
        self,
        model: nn.Module,
        loss: LossOrTerms,
        params: Any = None,
        *,
        curvature: CurvatureKind = "gauss-newton",
        damping: float = 45.0,
        chunk_size: ChunkSize = "auto",
        cg_iterations: int = 250,
        weight_decay: float = 0.0,
        lr: float = 1.0,
        seed: int = 0,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        cuda_graphs: bool = True,
        tf32: bool = False,
        process_group: ProcessGroup = None,
    ) -> None:
        if not 0 < damping < math.inf:
            raise ValueError(f"`damping` must be positive and finite, found {damping}")
        check_counts(cg_iterations=cg_iterations)
        check_flags(tf32=tf32)
        check_chunk_size(chunk_size)
        super().__init__(
            model,
            loss,
            params,
            {"lr": lr, "weight_decay": weight_decay},
            seed=seed,
            forward=forward,
            micro_batch=micro_batch,
            activation_memory=activation_memory,
            cuda_graphs=cuda_graphs,
            process_group=process_group,
        )
        self.curvature = Curvature(curvature)
        self.chunk_size: ChunkSize = chunk_size
        self.cg_iterations = cg_iterations
        self.tf32 = tf32
        self.param_groups[0].setdefault("damping", float(damping))
        self.param_groups[0].setdefault("chunk_position", 0)

    @property
    def damping(self) -> float:
        """λ of the next step."""
        return float(self.param_groups[0]["damping"])

    @overload  # type: ignore[override]
    def step(self, data: None = None, *, closure: Closure | None = None) -> Any: ...
    @overload
    def step(
        self, data: Any, *, closure: Closure | None = None, curvature_data: Any = None
    ) -> StepResult: ...

    def step(
        self, data: Any = None, *, closure: Closure | None = None, curvature_data: Any = None
    ) -> StepResult | None:
        """Make one iteration of Hessian-Free.

        Args:
            data: all the data: `(inputs, targets)`, a Dataset, a DataLoader or a list of batches.
                They are iterated over several times and must be the same each time.
            closure: called once before the step; its result and its gradients are ignored. It is
                for frameworks that wrap an optimiser and pass a closure.
            curvature_data: the samples for the curvature, instead of a chunk of `data`.

        Returns:
            What the step did. None if there are neither data (given or bound) nor terms: such a
            call only creates the optimiser's state, as checkpoint tools expect.

        The parameters change only if the objective on all the data went down; otherwise they stay
        as they were, bit for bit. After an error the optimiser's state and its knowledge of the
        model are restored as well.
        """
        if not self._begins(data, closure):
            return None

        def iterate(objective: Objective) -> StepResult:
            step = _Step(self, objective, self._repeatable(data))
            result = step.run(curvature_data)
            self.param_groups[0]["chunk_position"] = step.next_position
            return result

        return self._make_step(iterate, curvature_data=curvature_data)

    def _options(self) -> dict[str, Any]:
        return {
            "`curvature`": self.curvature.kind,
            "`chunk_size`": self.chunk_size,
            "`cg_iterations`": self.cg_iterations,
            "`tf32`": self.tf32,
        }

    def _learners(self) -> list[object]:
        return [*super()._learners(), self.curvature]

    def _create_state(self) -> None:
        self._zero_state(LAST_ITERATE)


class _Step:
    """The variables of one step, and the account of its cost."""

    def __init__(self, optimizer: HessianFree, objective: Objective, data: Samples) -> None:
        self.optimizer, self.objective, self.data = optimizer, objective, data
        self.ranks = objective.ranks
        self.damping = optimizer.damping
        self.next_position = int(optimizer.param_groups[0]["chunk_position"])
        self.account = Account(objective)
        self.total = self.evaluations = 0

    def run(self, curvature_data: Any) -> StepResult:
        """Martens' Algorithm 2 with the additions of his Section 4."""
        account = self.account
        account.note(damping=self.damping)
        self.ranks.enter("gradient")
        # The squares are the diagonal of the empirical Fisher matrix, for the preconditioner.
        found, norm = account.begin(partial(self.objective.value_gradient_and_squares, self.data))
        self.total = found.samples
        chunk = self.chunk(curvature_data)
        if not (math.isfinite(found.value) and math.isfinite(norm)):
            return account.refused(
                Status.NOT_FINITE, f"the loss is {found.value} and its gradient's norm {norm}"
            )
        if norm == 0:
            return account.refused(Status.STATIONARY)

        # d ≈ -(H + λI)⁻¹g, with the intermediate iterates of CG.
        self.ranks.enter("cg")
        solution = self.minimize_quadratic(found, chunk)
        if solution.stop is CGStop.NOT_FINITE:
            # The next step must not start CG from the same vector.
            nothing = self.copied_pieces(torch.zeros_like(found.gradient))
            self.ranks.settle()  # raises if an error on a rank made the product NaN
            self.remember(-math.inf, nothing)
            return account.refused(Status.NOT_FINITE, "a curvature product is not finite")

        self.ranks.enter("search")
        theta = self.objective.parameters.copy()
        result = None
        try:
            chosen, value = self.backtrack(theta, solution)
            # CG knows the quadratic with the damping term; ρ needs it without.
            damped = 0.5 * self.scaled_damping * float(chosen.point.square().sum())
            predicted = chosen.value - damped
            predicted = self.ranks.agreed_number(predicted)
            ratio = reduction_ratio(value - found.value, predicted)
            slope = self.ranks.agreed_number(float(found.gradient @ chosen.point))
            taken = self.search(theta, chosen.point, value, found.value, slope)
            last_iterate = self.copied_pieces(solution.last.point)
            account.note(
                reduction_ratio=ratio,
                chosen_iteration=chosen.iteration,
                evaluations=self.evaluations,
            )
            self.ranks.settle()
            self.remember(ratio, last_iterate)
            if taken is not None:
                result = account.moved(str(solution.stop), loss_after=taken)
        finally:
            if result is None:
                self.objective.parameters.assign(theta)
        if result is None:
            reason = self.reason_of_rejection(solution, chosen, theta)
            return account.refused(Status.NO_DECREASE, reason)
        return result

    @property
    def scaled_damping(self) -> float:
        """λ times the scale of the objective, which the curvature has too."""
        return self.damping * self.objective.scale

    def chunk(self, curvature_data: Any) -> Samples:
        """The samples for the curvature; advances `next_position` past a chunk."""
        if curvature_data is not None:
            return self.optimizer._samples(curvature_data, "curvature_data")
        length = chunk_length(self.optimizer.chunk_size, self.total)
        position = self.next_position % self.total
        self.next_position = (position + length) % self.total
        seed = int(self.optimizer.param_groups[0]["seed"])
        shard = None
        if not isinstance(self.data, TermSamples):  # all ranks have all samples of the terms
            shard = self.ranks.shard(self.own_samples())
        found: Samples = Nothing()
        with self.ranks.own_work():
            found = cycled_chunk(self.data, self.total, length, position, seed, shard)
        return found

    def own_samples(self) -> int:
        """The number of samples on this rank."""
        if self.data.indexed:
            return len(self.data)
        if self.ranks.size == 1:
            return self.total
        with self.ranks.own_work():
            return sum(batch.size for batch in self.data.batches())
        return 0

    def minimize_quadratic(self, found: Evaluation, chunk: Samples) -> CGResult:
        """CG on gᵀd + ½ dᵀ(H + λI)d, started from the decayed last iterate of the previous step."""
        optimizer, damping = self.optimizer, self.scaled_damping
        self.objective.parameters.add_decay_constant(found.squares)
        preconditioner = found.squares.add_(damping).pow_(PRECONDITIONER_POWER)
        product = optimizer.curvature.at(self.objective, chunk)
        start = optimizer._get_vector(LAST_ITERATE)
        with derivatives_in_tf32(optimizer.tf32):
            solution = conjugate_gradient(
                lambda v: product(v).add_(v, alpha=damping),
                found.gradient,
                solve=lambda v: v / preconditioner,
                start=None if start is None else start.mul_(START_DECAY),
                max_iterations=optimizer.cg_iterations,
                agreed=self.ranks.agreed,
            )
        self.account.note(
            iterations=solution.last.iteration,
            products=product.products,
            curvature_samples=product.samples,
            graphs_kept=product.kept,
        )
        self.account.count(product.products * product.samples)
        self.account.lap("cg")
        return solution

    def backtrack(self, theta: Tensor, solution: CGResult) -> tuple[CGIterate, float]:
        """Go from the last iterate of CG towards the first for as long as the objective improves.

        Late iterates overfit the chunk and the quadratic model. Earlier iterates may be better on
        all the data. Returns the chosen iterate and its value (infinity if not finite).
        """
        chosen, *earlier = reversed(solution.iterates)
        value = self.value_at(theta, chosen.point)
        for iterate in earlier:
            earlier_value = self.value_at(theta, iterate.point)
            if earlier_value >= value and math.isfinite(value):
                break
            chosen, value = iterate, earlier_value
        return chosen, value

    def search(
        self, theta: Tensor, direction: Tensor, value: float, before: float, slope: float
    ) -> float | None:
        """Shorten the direction until the objective decreases enough, and take the step.

        Returns:
            The objective after the step. None if there is no such step; the caller must then
            restore the parameters.
        """
        rate = 1.0
        for trial in range(LINE_SEARCH_TRIALS):
            if trial:
                rate *= RATE_SHRINKAGE
                value = self.value_at(theta, direction * rate)
            # A decrease is tested by itself: the slope may be positive after a bad start of CG.
            if value < before and value <= before + SUFFICIENT_DECREASE * rate * slope:
                break
            if slope >= 0:  # shorter steps do not help
                return None
        else:
            return None
        self.ranks.enter("step")
        step = self.ranks.agreed(direction * rate)
        if self.optimizer._scale_by_learning_rate(step):
            value = self.value_at(theta, step)
            # Values with and without autograd may differ by rounding: lr = 0 is no decrease.
            if not (value < before and bool(step.any())):
                return None
        self.objective.parameters.assign(theta + step)
        self.account.note(rate=rate, step_norm=length(step))
        return value

    def value_at(self, theta: Tensor, step: Tensor) -> float:
        """The objective on all the data at θ + step; infinity if it is not finite."""
        self.objective.parameters.assign(theta + step)
        value = self.objective.value(self.data)
        self.evaluations += 1
        self.account.count(self.total)
        return value if math.isfinite(value) else math.inf

    def copied_pieces(self, vector: Tensor) -> list[Tensor]:
        return self.objective.parameters.copied_pieces(vector)

    def remember(self, ratio: float, last_iterate: Sequence[Tensor]) -> None:
        """Store the damping and the last iterate of CG, in pieces, for the next step."""
        damping = adapted_damping(self.damping, ratio)
        self.optimizer.param_groups[0]["damping"] = damping
        self.optimizer._set_pieces(LAST_ITERATE, last_iterate)
        self.account.note(damping=damping)

    def reason_of_rejection(self, solution: CGResult, chosen: CGIterate, theta: Tensor) -> str:
        if solution.last.iteration == 0 and solution.stop is CGStop.NEGATIVE_CURVATURE:
            return "CG met curvature that is not positive at once; the damping was raised"
        if torch.equal(theta + chosen.point, theta):
            return (
                f"with λ = {self.damping:.3g} the step is too short to change the parameters: "
                "make HessianFree with a `damping` of the size of the loss's curvature"
            )
        return "the line search found no sufficient decrease"
