"""Krylov Subspace Descent (Vinyals & Povey 2011), Algorithm 3."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.batches import Samples, as_samples
from krylov_descent.bfgs import BFGSResult, minimize_bfgs
from krylov_descent.curvature import Curvature, CurvatureKind, CurvatureProduct
from krylov_descent.losses import Loss
from krylov_descent.network import Forward
from krylov_descent.objective import Evaluation, Objective
from krylov_descent.optimizers.base import DataOptimizer, Stopwatch
from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.preconditioner import Preconditioner, make_preconditioner
from krylov_descent.subsets import Reservoir, Size, SubsetSizes, draw
from krylov_descent.subspace import Coordinates, Subspace, krylov_basis
from krylov_descent.subspace_objective import SubspaceObjective

PREVIOUS_STEP = "previous_step"


class KSD(DataOptimizer):
    """Krylov Subspace Descent: second-order training without learning rate or damping.

    Each step builds a Krylov subspace of dimension K from the gradient and curvature products,
    adds the previous step, and minimises the objective itself inside it with BFGS. Three sets of
    samples serve a step: A (all the data) for the gradient, random B for the curvature, random C
    for the search.

    Args:
        model: the module to train.
        loss: one of torch's losses, a callable `(outputs, targets) -> one number per sample`, or
            one that returns their mean.
        params: the parameters to train, as torch.optim takes them (tensors, named tensors, or
            groups with `weight_decay` and `lr`); all of the model's by default. Those with
            `requires_grad=False` are left alone.
        dimension: K, the dimension of the Krylov subspace.
        curvature: "gauss-newton", "hessian" or "fisher".
        preconditioner: "fisher-diagonal", "identity", or an object with the `Preconditioner`
            protocol.
        subset_size: size of B and C: "auto" (N/K, at least 1,000; all samples where two disjoint
            sets of that size do not fit), "paper" (N/K), a number of samples, a fraction of them,
            or a pair of these for B and C.
        bfgs_iterations: the most iterations of the search.
        epsilon: floor of preconditioner and projected curvature, relative to their largest entry.
        weight_decay: λ of the L2 term ½λ‖θ‖², which belongs to the objective.
        lr: scales the step that the search found; for schedulers. Leave it at 1.
        seed: of the random sets.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples handled at a time; by default as many as fit
            `activation_memory`.
        activation_memory: bytes that activations may take; 1 GiB on a CPU and a quarter of the
            free memory on a GPU by default.

    Cost of a step, in gradients over one sample: |A|·4/3 + (K + 1)·|B|·4/3 + evaluations·|C|,
    with about K evaluations.

    Memory beyond the model, the data and activations, in vectors of n numbers:

    | what | vectors |
    | --- | --- |
    | basis | K + 1 |
    | previous step (kept between steps) | 1 |
    | preconditioner | 1 |
    | copy of the parameters (search), graph of Jᵀu (basis) | 1 |
    | working vectors | 2 to 3 |
    | together at most | K + 8 |

    Activations: those of one micro-batch; for curvature products the graphs of all of B while
    they fit `activation_memory`, else they are rebuilt for each product (`graphs_kept`).

    Example:
        >>> optimizer = KSD(model, torch.nn.CrossEntropyLoss())
        >>> for _ in range(30):
        ...     result = optimizer.step((inputs, targets))
        ...     print(result)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        params: Any = None,
        *,
        dimension: int = 20,
        curvature: CurvatureKind = "gauss-newton",
        preconditioner: str | Preconditioner = "fisher-diagonal",
        subset_size: Size | tuple[Size, Size] = "auto",
        bfgs_iterations: int = 30,
        epsilon: float = 1e-4,
        weight_decay: float = 0.0,
        lr: float = 1.0,
        seed: int = 0,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
    ) -> None:
        if dimension < 1:
            raise ValueError(f"`dimension` must be at least 1, found {dimension}")
        if bfgs_iterations < 1:
            raise ValueError(f"`bfgs_iterations` must be at least 1, found {bfgs_iterations}")
        if not 0 < epsilon < 1:
            raise ValueError(f"`epsilon` must lie between 0 and 1, found {epsilon}")
        super().__init__(
            model,
            loss,
            params,
            {"lr": lr, "weight_decay": weight_decay},
            seed=seed,
            forward=forward,
            micro_batch=micro_batch,
            activation_memory=activation_memory,
        )
        self.dimension = dimension
        self.curvature = Curvature(curvature)
        self.preconditioner = make_preconditioner(preconditioner, epsilon)
        self.subset_sizes = SubsetSizes.checked(subset_size, dimension)
        self.bfgs_iterations = bfgs_iterations
        self.epsilon = epsilon

    def step(  # type: ignore[override]
        self,
        data: Any = None,
        *,
        closure: None = None,
        curvature_data: Any = None,
        objective_data: Any = None,
    ) -> StepResult | None:
        """One iteration of Algorithm 3.

        Args:
            data: the set A: `(inputs, targets)`, a Dataset, a DataLoader or an iterable of
                batches. Batches are moved to the parameters' device.
            closure: always None; here because torch.optim has it.
            curvature_data: the set B, where it is not to be drawn from `data`.
            objective_data: the set C, likewise.

        Returns:
            What the step did. None for a call without data, with which checkpoint tools create
            the optimiser's state.

        The parameters change only if the objective on C went down; otherwise, and after any
        error, they are bit for bit as before.
        """
        if not self._wants_to_step(data, closure):
            return None
        with self._working() as objective:
            return _Step(self, objective).run(data, curvature_data, objective_data)

    def _create_state(self) -> None:
        self._zero_state(PREVIOUS_STEP)


class _Step:
    """One step under way: the algorithm's variables and the account of what it cost."""

    def __init__(self, optimizer: KSD, objective: Objective) -> None:
        self.optimizer, self.objective = optimizer, objective
        self.watch = Stopwatch()
        self.account: dict[str, Any] = {}

    def run(self, data: Any, curvature_data: Any, objective_data: Any) -> StepResult:
        """Algorithm 3, lines 3 to 13."""
        # Lines 3-5. The sets; gradient g and preconditioner D on A.
        gradient, curvature_set, objective_set = self.gradient_and_sets(
            data, curvature_data, objective_data
        )
        if not math.isfinite(gradient.value):
            return self.refused(Status.NOT_FINITE, f"the loss on A is {gradient.value}")
        norm = float(gradient.gradient.norm())
        self.account["gradient_norm"] = norm
        if not math.isfinite(norm):
            return self.refused(Status.NOT_FINITE, "the gradient on A is not finite")
        if norm == 0:
            return self.refused(Status.STATIONARY)

        # Lines 6-9. Basis V and projected curvature on B; coordinates in which it is round.
        subspace = self.subspace(curvature_set, gradient.gradient)
        del gradient
        if not bool(subspace.curvature.isfinite().all()):
            return self.refused(Status.NOT_FINITE, "a curvature product on B is not finite")
        coordinates = Coordinates(subspace.curvature, self.optimizer.epsilon)
        self.account["ritz_values"] = tuple(coordinates.ritz_values.tolist())

        # Lines 10-11. The best point of the subspace on C.
        theta = self.objective.parameters.copy()
        function = SubspaceObjective(self.objective, objective_set, theta, subspace, coordinates)
        moved = False
        try:
            start = function.evaluate(torch.zeros(subspace.rank, dtype=torch.float64))
            found = self.search(function, start)
            # Lines 12-13. d_prev ← V̄a*, θ ← θ + d_prev.
            if found is not None and found.value < start.value:
                moved = self.take(function, theta, found, start)
        finally:
            if not moved:
                self.objective.parameters.assign(theta)
        return self.finished(start, found, moved)

    def gradient_and_sets(
        self, data: Any, curvature_data: Any, objective_data: Any
    ) -> tuple[Evaluation, Samples, Samples]:
        """Walk over A once; B and C by index, or from the stream on its way through."""
        optimizer, generator = self.optimizer, self.optimizer._generator()
        samples = as_samples(data)
        by_hand = curvature_data is not None and objective_data is not None
        reservoir = None
        if not by_hand and not samples.indexed:
            samples = reservoir = Reservoir(samples, optimizer.subset_sizes, generator)
        found = optimizer.preconditioner.update(self.objective, samples)
        if by_hand:
            drawn = None
        elif reservoir is not None:
            drawn = reservoir.draw()
        else:
            drawn = draw(samples, optimizer.subset_sizes, generator)
        sets = [
            drawn[i] if given is None and drawn is not None else as_samples(given, name)
            for i, (given, name) in enumerate(
                [(curvature_data, "curvature_data"), (objective_data, "objective_data")]
            )
        ]
        self.account |= {"loss": found.value, "samples": found.samples, "passes": 1.0}
        self.watch.lap("gradient")
        return found, sets[0], sets[1]

    def subspace(self, curvature_set: Samples, gradient: Tensor) -> Subspace:
        """Algorithm 2."""
        optimizer = self.optimizer
        product: CurvatureProduct = optimizer.curvature.at(self.objective, curvature_set)
        subspace = krylov_basis(
            product,
            optimizer.preconditioner.solve,
            gradient,
            optimizer._get_vector(PREVIOUS_STEP),
            optimizer.dimension,
        )
        self.account |= {
            "rank": subspace.rank,
            "products": product.products,
            "curvature_samples": product.samples,
            "graphs_kept": product.kept,
        }
        self.count_samples(product.products * product.samples)
        self.watch.lap("basis")
        return subspace

    def search(self, function: SubspaceObjective, start: Evaluation) -> BFGSResult | None:
        """BFGS from a = 0; None where the objective is not finite there."""
        self.account |= {"objective_samples": start.samples, "evaluations": 1}
        gradient = function.project(start)
        if not (math.isfinite(start.value) and bool(gradient.isfinite().all())):
            return None
        noise = function.noise(start, gradient)
        found = minimize_bfgs(
            function,
            torch.zeros_like(gradient),
            initial=(start.value, gradient),
            max_iterations=self.optimizer.bfgs_iterations,
            noise=noise,
        )
        self.account |= {
            "noise": noise,
            "iterations": found.iterations,
            "evaluations": found.evaluations + 1,
        }
        self.count_samples(function.samples_seen)
        return found

    def take(
        self, function: SubspaceObjective, theta: Tensor, found: BFGSResult, start: Evaluation
    ) -> bool:
        """Write θ + d into the parameters; with lr ≠ 1 only if that still is a decrease."""
        parameters = self.objective.parameters
        step = function.direction(found.point)
        rates = self.optimizer._learning_rates()
        value = found.value
        scaled = any(rate != 1.0 for rate in rates)
        if scaled:
            for piece, rate in zip(parameters.pieces(step), rates, strict=True):
                piece.mul_(rate)
        parameters.assign(theta + step)
        if scaled:
            value = self.objective.value(function.data)
            self.count_samples(start.samples)
            if not value < start.value:
                return False
        self.optimizer._set_vector(PREVIOUS_STEP, step)
        self.account |= {"loss_after": value, "step_norm": float(step.norm())}
        return True

    def finished(self, start: Evaluation, found: BFGSResult | None, moved: bool) -> StepResult:
        self.account["loss_before"] = start.value
        if found is None:
            return self.refused(Status.NOT_FINITE, "the loss or its gradient on C is not finite")
        if not moved:
            return self.refused(Status.NO_DECREASE)
        return self.result(Status.MOVED, str(found.reason))

    def refused(self, status: Status, reason: str | None = None) -> StepResult:
        loss = self.account["loss"]
        before = self.account.setdefault("loss_before", loss)
        self.account["loss_after"] = before
        return self.result(status, reason or status.value)

    def result(self, status: Status, reason: str) -> StepResult:
        self.watch.lap("search")
        return StepResult(status=status, reason=reason, seconds=self.watch.seconds, **self.account)

    def count_samples(self, samples: int) -> None:
        self.account["passes"] += samples / self.account["samples"]
