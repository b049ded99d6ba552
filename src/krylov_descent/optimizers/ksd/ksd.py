"""Krylov Subspace Descent (Vinyals & Povey 2011), Algorithm 3."""

from typing import Any, overload

from krylov_descent.curvature.damped_basis import UnsuitedError
from krylov_descent.curvature.kept_jacobian import NoJacobianError
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.base import Closure
from krylov_descent.optimizers.ksd import damped_phase, escalation, subset_growth
from krylov_descent.optimizers.ksd import dimension as directions
from krylov_descent.optimizers.ksd.iteration import Iteration, RescaledError, longest_basis
from krylov_descent.optimizers.ksd.ksd_state import KSDState
from krylov_descent.optimizers.ksd.step_sets import StepSets
from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.runtime.engine import Engine
from krylov_descent.runtime.precision import derivatives_in_tf32


class KSD(KSDState):
    """Krylov Subspace Descent: second-order training without learning rate or damping.

    Each step builds a Krylov subspace of dimension K from the gradient and curvature products, adds
    previous steps, and minimises the objective itself inside the subspace with BFGS. A step uses
    three sets of samples: A (all the data) for the gradient, random B for the curvature, random C
    for the search.

    Args:
        model: the module to train.
        loss: one of torch's losses, a callable `(outputs, targets) -> one number per sample`, or
            one that returns their mean; or a dict of `Term`s, which have their own samples.
        params: the parameters to train, as torch.optim takes them (tensors, named tensors, or
            groups with `weight_decay` and `lr`); all of the model's by default. Parameters with
            `requires_grad=False` are not trained.
        dimension: K, the dimension of the Krylov subspace. "auto" begins with 8, and each step
            chooses K of the next by the decrease that directions bring for their work. Where all
            terms are residuals, which differentiate the net, many but fewer than parameters, "auto"
            begins with steps along damped Gauss-Newton directions (float64, one process; see
            "Damped steps first" on the page "Method").
        curvature: "gauss-newton", "hessian" or "fisher".
        preconditioner: "kronecker" (see `KroneckerFactors`; used after 10 steps with the diagonal),
            "fisher-diagonal", "identity", or an object with the `Preconditioner` protocol. "auto"
            takes Kronecker factors if they can be had and are cheap (a classifier of Linear layers
            has none in the 10 steps before), and else the diagonal: its root for a forward pass
            that differentiates, its fourth root for convolutional and recurrent nets.
        subset_size: size of B and C: a number of samples, a fraction of them, "paper" (N/K, with
            K = 20 if that is "auto"), "fixed" (N/K, at least 1,000), "auto", or a pair of these for
            B and C. "auto" is like "fixed", except where all steps have the same data in memory.
            There a large model on a CPU begins with fewer samples, down to 250, and the sets double
            when less than half of the decrease on C is seen on A. "fixed" and "auto" take all
            samples if two disjoint sets do not fit into the data. A search of terms that would
            raise their loss on all points is repeated on all of them.
        previous_steps: m, how many of the last steps join the subspace. The paper has 1. Each step
            deviates towards its own C; with more steps these deviations can cancel.
        bfgs_iterations: the most iterations of the search. With "auto" it ends when the last
            evaluations brought less than the whole step for their work.
        epsilon: floor of the preconditioner, relative to its largest entry (a tenth of it is the
            damping of Kronecker factors), and of the Hessian's eigenvalues in the subspace. The
            other curvatures have a hundredth of that floor, and in float64 2e-14 for each
            direction.
        weight_decay: λ of the L2 term ½λ‖θ‖², which is part of the objective.
        lr: scales the step that the search found; for schedulers. Leave it at 1.
        seed: of the random sets.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples processed at a time; by default as many as fit
            `activation_memory`.
        activation_memory: the most bytes for activations; by default 1 GiB on a CPU and a quarter
            of the free memory on a GPU.
        cuda_graphs: on a GPU, record products and evaluations once and replay them; False runs them
            eagerly.
        tf32: on a GPU, compute backward passes and curvature products in TensorFloat-32: several
            times as fast for large layers, with three digits. Forward passes keep torch's own
            setting, so the minimised objective stays exact. "auto" does so where the GPU can,
            unless torch was told with how many digits to multiply.
        basis: "replicated" keeps the whole basis on every rank; "sharded" keeps a slice of each
            vector per rank, and sends vectors in each evaluation.
        basis_dtype: torch.bfloat16 keeps the basis in half the memory of float32.
        basis_device: "cpu" keeps the basis in the host's (pinned) memory, from which it is fetched
            in blocks.
        process_group: the ranks that train together: a torch.distributed.ProcessGroup or a
            one-dimensional DeviceMesh; all processes by default.

    Under an initialised process group (`torchrun`) each rank passes its own part of the data to
    `step`, of any size. B and C are drawn from the data of all ranks, and each rank gets the result
    that one process would get on all of the data (with Kronecker factors, or a diagonal estimated
    by random signs, an equally good one; damped steps are made by one process only). Terms must be
    the same on every rank, with all their points; each rank computes its share. Every rank must
    call `step`, with the same model and options.

    The page "Cost and memory" lists the cost and the memory of a step: with a diagonal
    preconditioner at most K + 12 vectors like the parameters, with Kronecker factors about 2K.

    Example:
        >>> optimizer = KSD(model, torch.nn.CrossEntropyLoss())
        >>> for _ in range(30):
        ...     result = optimizer.step((inputs, targets))
        ...     print(result)
    """

    _eager_steps = 1  # of a training; those that follow are run by the device's engine

    @overload  # type: ignore[override]
    def step(self, data: None = None, *, closure: Closure | None = None) -> Any: ...
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
        """Make one iteration of Algorithm 3.

        Args:
            data: the set A: `(inputs, targets)`, a Dataset, a DataLoader or an iterable of batches.
                Batches are moved to the parameters' device.
            closure: called once before the step; its result and its gradients are ignored. It is
                for frameworks that wrap an optimiser and pass a closure.
            curvature_data: the set B; drawn from `data` by default.
            objective_data: the set C; drawn from `data` by default.

        Returns:
            What the step did. None if there are neither data (given or bound) nor terms: such a
            call only creates the optimiser's state, as checkpoint tools expect.

        The parameters change only if the objective on C went down; otherwise they stay as they
        were, bit for bit. After an error the optimiser's state and its knowledge of the model are
        restored as well.
        """
        if not self._begins(data, closure):
            return None
        self._create_entries()  # a loaded state may lack them
        sets = StepSets(self, data, curvature_data, objective_data)
        return self._make_step(
            lambda objective: self._step(objective, sets),
            curvature_data=curvature_data,
            objective_data=objective_data,
        )

    def _engine(self) -> Engine:
        """The engine of the next step: the eager engine at the beginning of a training.

        Another engine prepares the work of a step when it first runs it. That takes several times
        as long as the few directions of the first step, whose result should not wait for it.
        """
        engine = super()._engine()
        return engine if self.steps >= self._eager_steps else self._plain_engine

    def _step(self, objective: Objective, sets: StepSets) -> StepResult:
        """Run the iteration, and adapt the sets and the basis of the next step to its result."""
        group = self.param_groups[0]
        was_damped = damped_phase.has_steps(group)
        # After a refused step no tf32: rounding may have caused the refusal.
        with derivatives_in_tf32(self._is_in_tf32 and not escalation.is_under_way(group)):
            if self.subset_sizes.grow:
                sets.compare_data()
            iteration, result = Iteration(self, objective, sets), None
            while result is None:
                try:
                    result = self._iterate(iteration)
                except RescaledError:  # the scale of the objective changed; at most twice per step
                    continue
                except (UnsuitedError, NoJacobianError):  # of a damped step
                    damped_phase.end(group)
            if self.subset_sizes.grow:
                subset_growth.learn(group, result)
            usual = int(group[directions.DIRECTIONS])
            if result.status is Status.MOVED:
                escalation.take_back(group, usual)
            elif escalation.is_refusal(result) and damped_phase.is_under_way(group):
                result = damped_phase.refused(group, result)
            elif escalation.is_refusal(result):
                longest = longest_basis(objective)
                result = escalation.escalate(group, result, usual, longest, by_hand=not sets.drawn)
        if was_damped and not damped_phase.is_under_way(group):
            objective.engine.change_basis()  # which frees the Jacobian
        return result

    def _iterate(self, step: Iteration) -> StepResult:
        """Algorithm 3, lines 3 to 13."""
        # Lines 3-5. Gradient g and preconditioner D on A; B and C are drawn.
        # Lines 6-8. Basis V of the Krylov space and previous steps, and H̄ = VᵀHV, on B. An engine
        # may start on the basis before the gradient is checked.
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
            if step.fitted_its_points(f, best):  # again, on all points
                f = step.search().result().over(found.subspace, coordinates)
                best = step.minimize(f, coordinates)
            # Lines 12-13. d_prev = V̄a*, and θ + d_prev.
            result = step.take(f, best)
        finally:
            if f is not None and result is None:
                f.restore()
        return result or step.no_decrease(f, best)
