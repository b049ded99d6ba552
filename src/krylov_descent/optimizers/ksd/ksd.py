"""Krylov Subspace Descent (Vinyals & Povey 2011), Algorithm 3."""

from typing import Any, overload

from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.base import Closure
from krylov_descent.optimizers.ksd import escalation, subset_growth
from krylov_descent.optimizers.ksd.iteration import Iteration, RescaledError, longest_basis
from krylov_descent.optimizers.ksd.ksd_state import KSDState
from krylov_descent.optimizers.ksd.step_sets import StepSets
from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.runtime.precision import derivatives_in_tf32


class KSD(KSDState):
    """Krylov Subspace Descent: second-order training without learning rate or damping.

    Each step builds a Krylov subspace of dimension K from the gradient and curvature products,
    adds previous steps, and minimises the objective itself inside it with BFGS. Three sets of
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
        preconditioner: "fisher-diagonal", "kronecker" (see `KroneckerFactors`; after 20 steps with
            the diagonal), "identity", or an object with the `Preconditioner` protocol.
        subset_size: size of B and C: "fixed" (N/K, at least 1,000), "auto" (the same, but where all
            steps have the same data in memory it begins with less for large models on a CPU, down
            to 250, and is doubled when less than half of a step's worth on C is seen on A), "paper"
            (N/K), a number of samples, a fraction of them, or a pair of these for B and C. The
            first two are all samples where two disjoint sets of that size do not fit.
        previous_steps: m, how many of the last steps join the subspace. The paper has 1; more of
            them let the deviations of single steps, each for its own C, cancel.
        bfgs_iterations: the most iterations of the search.
        epsilon: floor of the preconditioner, relative to its largest entry (a tenth of it is the
            damping of Kronecker factors), and of the Hessian's eigenvalues in the subspace; those
            of the other curvatures have a hundredth of it.
        weight_decay: λ of the L2 term ½λ‖θ‖², which belongs to the objective.
        lr: scales the step that the search found; for schedulers. Leave it at 1.
        seed: of the random sets.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples handled at a time; by default as many as fit
            `activation_memory`.
        activation_memory: bytes that activations may take; 1 GiB on a CPU and a quarter of the
            free memory on a GPU by default.
        cuda_graphs: on a GPU, record products and evaluations once and replay them; False to run
            them as they are.
        tf32: on a GPU, backward passes and curvature products in TensorFloat-32: several times as
            fast for large layers, with three digits. Forward passes keep torch's own setting, so
            what is minimised stays exact. (The squares for "fisher-diagonal" may be in
            TensorFloat-32 in any case: see `precision.rough_products`.)
        basis: "replicated" keeps the whole basis on every rank; "sharded" keeps a slice of each
            vector, and sends vectors in each evaluation (see below).
        basis_dtype: torch.bfloat16 to keep the basis in half the memory of float32.
        basis_device: "cpu" to keep the basis in the host's (pinned) memory, from where it is
            fetched in blocks.
        process_group: whose ranks train together: a torch.distributed.ProcessGroup or a DeviceMesh
            of one dimension; all processes by default.

    Under an initialised process group (`torchrun`) each rank gives its own part of the data to
    `step`, of any size, and gets the result of one process on all of them (with Kronecker factors
    one that is as good); B and C are drawn from all of them. Every rank must call `step`, with the
    same model and options.

    The page "Cost and memory" has what a step costs, and what it holds in memory: about K + 8
    vectors like the parameters.

    Example:
        >>> optimizer = KSD(model, torch.nn.CrossEntropyLoss())
        >>> for _ in range(30):
        ...     result = optimizer.step((inputs, targets))
        ...     print(result)
    """

    @overload  # type: ignore[override]
    def step(self, data: None = None, *, closure: None = None) -> None: ...
    @overload
    def step(
        self,
        data: Any,
        *,
        closure: Closure | None = None,
        curvature_data: Any = None,
        objective_data: Any = None,
    ) -> StepResult: ...

    def step(
        self,
        data: Any = None,
        *,
        closure: Closure | None = None,
        curvature_data: Any = None,
        objective_data: Any = None,
    ) -> StepResult | None:
        """One iteration of Algorithm 3.

        Args:
            data: the set A: `(inputs, targets)`, a Dataset, a DataLoader or an iterable of
                batches. Batches are moved to the parameters' device.
            closure: called once before the step, with its result and its gradients left alone;
                for frameworks that wrap an optimiser and pass one.
            curvature_data: the set B, where it is not to be drawn from `data`.
            objective_data: the set C, likewise.

        Returns:
            What the step did. None for a call without data, with which checkpoint tools create
            the optimiser's state.

        The parameters change only if the objective on C went down; otherwise they are bit for bit
        as before. After any error so are the optimiser's state and what it knows of the model.
        """
        if not self._begins(data, closure):
            return None
        escalation.begin(self.param_groups[0])  # a state that was loaded may be older
        sets = StepSets(self, data, curvature_data, objective_data)
        return self._make_step(
            lambda objective: self._step(objective, sets),
            curvature_data=curvature_data,
            objective_data=objective_data,
        )

    def _step(self, objective: Objective, sets: StepSets) -> StepResult:
        """The iteration, what the sets and the basis learn from the step before, and from it."""
        group = self.param_groups[0]
        # With few digits a refused step may be refused for want of them.
        with derivatives_in_tf32(self.tf32 and not escalation.is_under_way(group)):
            if self.subset_sizes.grow:
                sets.compare_data()
            iteration, result = Iteration(self, objective, sets), None
            while result is None:
                try:
                    result = self._iterate(iteration)
                except RescaledError:  # the objective has another scale now, at most twice
                    continue
            if self.subset_sizes.grow:
                subset_growth.learn(group, result)
            if result.status is Status.MOVED:
                escalation.take_back(group, self.dimension)
            elif escalation.is_refusal(result):
                longest = longest_basis(objective)
                result = escalation.escalate(
                    group, result, self.dimension, longest, by_hand=not sets.drawn
                )
        return result

    def _iterate(self, step: Iteration) -> StepResult:
        """Algorithm 3, lines 3 to 13."""
        # Lines 3-5. Gradient g and preconditioner D on A; B and C are drawn.
        # Lines 6-8. Basis V of the Krylov space and previous steps, and H̄ = VᵀHV, on B. An engine
        # may begin with it before anything is known of the gradient.
        gradient = step.gradient()
        basis = step.basis(gradient)
        if refusal := step.refusal(gradient):
            return refusal
        del gradient
        search, f, result = step.search(), None, None
        try:
            found = basis.result()
            if refusal := step.refusal_of(found):
                return refusal
            # Line 9. Coordinates in which the curvature is the identity: V̄ = VC⁻ᵀ.
            coordinates = step.coordinates(found.subspace)
            # Lines 10-11. The best point a* of the subspace, by BFGS on C from a = 0.
            f = search.result().over(found.subspace, coordinates)
            best = step.minimize(f, coordinates)
            # Lines 12-13. d_prev = V̄a*, and θ + d_prev.
            result = step.take(f, best)
        finally:
            if f is not None and result is None:
                f.restore()
        return result or step.no_decrease(f, best)
