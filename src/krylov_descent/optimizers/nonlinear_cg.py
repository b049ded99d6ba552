"""Nonlinear conjugate gradients on the full batch, as a baseline for comparison."""

import math
from functools import partial
from typing import Any, get_args, overload

import torch
from torch import Tensor, nn

from krylov_descent.algorithms.conjugate_directions import (
    ConjugateDirections,
    Formula,
    Memory,
    NonlinearCGResult,
    first_step,
)
from krylov_descent.algorithms.minimizer import minimize
from krylov_descent.algorithms.noise import (
    NOISE_POINTS,
    noise_over_ranks,
    noise_steps,
    settled_noise,
)
from krylov_descent.objective.batches import Samples
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.network import Forward
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.term import LossOrTerms
from krylov_descent.optimizers.account import Account
from krylov_descent.optimizers.base import Closure, DataOptimizer
from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult
from krylov_descent.runtime.process_group import ProcessGroup
from krylov_descent.runtime.validation import check_counts

DIRECTION, GRADIENT = "direction", "gradient"


class NonlinearCG(DataOptimizer):
    """Nonlinear conjugate gradients with a line search for the strong Wolfe conditions.

    Args:
        model: the module to train.
        loss: one of torch's losses, a callable `(outputs, targets) -> one number per sample`, or
            one that returns their mean; or a dict of `Term`s, which have their own samples.
        params: the parameters to train, as torch.optim takes them; all of the model's by default.
        formula: "polak-ribiere" (with β not below zero) or "hestenes-stiefel".
        iterations: line searches in one step. Each step begins with a new gradient, because the
            data may have changed. The iterations share its cost.
        slope_tolerance: a line search ends where the slope is at most this fraction of the initial
            slope; lower means more exact.
        weight_decay: λ of the L2 term ½λ‖θ‖², which is part of the objective.
        lr: scales the step; for schedulers. Leave it at 1.
        seed: of the random signs that measure the gradient's noise when no decrease was found. The
            search itself draws no random numbers.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples processed at a time; by default as many as fit
            `activation_memory`.
        activation_memory: the most bytes for activations; by default 1 GiB on a CPU and a quarter
            of the free memory on a GPU.
        cuda_graphs: on a GPU, record the gradient once and replay it; False runs it eagerly.
        process_group: the ranks that train together: a torch.distributed.ProcessGroup or a
            one-dimensional DeviceMesh; all processes by default.

    Under an initialised process group (`torchrun`) each rank passes its own part of the data to
    `step` and gets the result that one process would get on all of the data. Terms must be the same
    on every rank, with all their points; each rank computes its share.

    Cost of a step: a gradient over the data for each trial of a line search, one for the start, and
    four forward passes that measure the noise of the values. Memory beyond the model, the data and
    activations: 12 vectors of n numbers, two of them kept between steps, and up to 7 more where a
    line search stands at a kink. With `cuda_graphs` a copy of the data and activations (up to 1
    GiB) stay allocated.
    """

    data_parallel = True
    learnt = ("promised", "directions_since_restart")

    def __init__(
        self,
        model: nn.Module,
        loss: LossOrTerms,
        params: Any = None,
        *,
        formula: Formula = "polak-ribiere",
        iterations: int = 20,
        slope_tolerance: float = 0.1,
        weight_decay: float = 0.0,
        lr: float = 1.0,
        seed: int = 0,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        cuda_graphs: bool = True,
        process_group: ProcessGroup = None,
    ) -> None:
        if formula not in get_args(Formula):
            raise ValueError(
                f"`formula` must be one of {', '.join(map(repr, get_args(Formula)))}, "
                f"found {formula!r}"
            )
        check_counts(iterations=iterations)
        if not 1e-4 < slope_tolerance < 1:
            raise ValueError(
                f"`slope_tolerance` must lie between 0.0001 and 1, found {slope_tolerance}"
            )
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
        self.formula: Formula = formula
        self.iterations = iterations
        self.slope_tolerance = slope_tolerance
        self.param_groups[0].setdefault("promised", 0.0)
        self.param_groups[0].setdefault("directions_since_restart", 0)

    @overload  # type: ignore[override]
    def step(self, data: None = None, *, closure: Closure | None = None) -> Any: ...
    @overload
    def step(self, data: Any, *, closure: Closure | None = None) -> StepResult: ...

    def step(self, data: Any = None, *, closure: Closure | None = None) -> StepResult | None:
        """Make up to `iterations` iterations of conjugate gradients.

        Args:
            data: `(inputs, targets)`, a Dataset, a DataLoader or a list of batches. They are
                iterated over several times and must be the same each time.
            closure: called once before the step; its result and its gradients are ignored. It is
                for frameworks that wrap an optimiser and pass a closure.

        Returns:
            What the step did. None if there are neither data (given or bound) nor terms: such a
            call only creates the optimiser's state, as checkpoint tools expect.

        The parameters change only if the objective went down; otherwise they stay as they were, bit
        for bit. After an error the optimiser's state and its knowledge of the model are restored as
        well.
        """
        if not self._begins(data, closure):
            return None
        return self._make_step(
            lambda objective: _Step(self, objective, self._repeatable(data)).run()
        )

    def _options(self) -> dict[str, Any]:
        return {
            "`formula`": self.formula,
            "`iterations`": self.iterations,
            "`slope_tolerance`": self.slope_tolerance,
        }

    def _create_state(self) -> None:
        self._zero_state(DIRECTION)
        self._zero_state(GRADIENT)

    def _memory(self) -> Memory | None:
        direction, gradient = self._get_vector(DIRECTION), self._get_vector(GRADIENT)
        if direction is None or gradient is None:
            return None
        group = self.param_groups[0]
        scale = self.objective.scale
        return Memory(
            direction.mul_(scale),
            gradient.mul_(scale),
            group["promised"] * scale,
            group["directions_since_restart"],
        )

    def _remember(self, memory: Memory | None) -> None:
        """Store the memory for the next step, after the last point where a rank can fail."""
        parameters, group = self.objective.parameters, self.param_groups[0]
        if memory is None:
            nothing = torch.zeros(parameters.numel, dtype=parameters.dtype).to(parameters.device)
            memory = Memory(nothing, nothing, 0.0, 0)
        # Stored without the scale, because a resumed run finds its own scale.
        scale = self.objective.scale
        vectors = (memory.direction / scale, memory.gradient / scale)
        direction, gradient = map(parameters.copied_pieces, vectors)
        self.objective.ranks.settle()
        self._set_pieces(DIRECTION, direction)
        self._set_pieces(GRADIENT, gradient)
        group["promised"] = memory.promised / scale
        group["directions_since_restart"] = memory.count


class _Step:
    """One step, and the account of its cost."""

    def __init__(self, optimizer: NonlinearCG, objective: Objective, data: Samples) -> None:
        self.optimizer, self.objective, self.data = optimizer, objective, data
        self.ranks = objective.ranks
        self.account = Account(objective)

    def run(self) -> StepResult:
        account, parameters = self.account, self.objective.parameters
        self.ranks.enter("gradient")
        start, norm = account.begin(partial(self.objective.value_and_gradient, self.data))
        account.note(evaluations=1)
        if not (math.isfinite(start.value) and math.isfinite(norm)):
            return account.refused(
                Status.NOT_FINITE, f"the loss is {start.value} and its gradient's norm {norm}"
            )
        if norm == 0:
            return account.refused(Status.STATIONARY)
        slope = -self.ranks.agreed_number(float(start.gradient @ start.gradient))

        self.ranks.enter("search")
        theta = parameters.copy()
        result = None
        try:
            found = self.search(theta, start, slope)
            after = self.take(theta, found, start) if found.value < start.value else None
            if after is not None:
                result = account.moved(str(found.reason), loss_after=after)
        finally:
            if result is None:
                parameters.assign(theta)
        if result is None:
            if found.value < start.value:
                result = account.refused(Status.NO_DECREASE, SCALED_AWAY)
            else:
                generator = self.optimizer._generator()
                result = account.no_decrease(str(found.reason), self.data, theta, generator)
            self.optimizer._remember(None)
        return result

    def search(self, theta: Tensor, start: Evaluation, slope: float) -> NonlinearCGResult:
        """Iterate from θ; `slope` is the slope along -g at θ."""
        optimizer = self.optimizer
        memory = optimizer._memory()
        noise = self.noise(theta, start, slope, memory)
        directions = ConjugateDirections(
            theta,
            start.value,
            start.gradient,
            formula=optimizer.formula,
            memory=memory,
            max_iterations=optimizer.iterations,
            slope_tolerance=optimizer.slope_tolerance,
            noise=noise,
            agreed=self.ranks.agreed_number,
        )
        found = minimize(directions, self.value_and_gradient)
        self.account.note(
            noise=noise, iterations=found.iterations, evaluations=found.evaluations + 1
        )
        return found

    def take(self, theta: Tensor, found: NonlinearCGResult, start: Evaluation) -> float | None:
        """Write the point found into the parameters, and return the objective there.

        Returns None if `lr` ≠ 1 and the scaled step is no decrease.
        """
        self.ranks.enter("step")
        point = self.ranks.agreed(found.point)
        step, value, memory = point - theta, found.value, found.memory
        if self.optimizer._scale_by_learning_rate(step):
            self.objective.parameters.assign(theta + step)
            value, memory = self.objective.value(self.data), None
            self.account.count(start.samples)
            # Values with and without autograd may differ by rounding: lr = 0 is no decrease.
            if not (value < start.value and bool(step.any())):
                return None
        else:
            self.objective.parameters.assign(point)
        self.account.note(step_norm=length(step))
        self.optimizer._remember(memory)
        return value

    def value_and_gradient(self, point: Tensor) -> tuple[float, Tensor]:
        self.objective.parameters.assign(point)
        found = self.objective.value_and_gradient(self.data)
        self.account.count(found.samples)
        return found.value, found.gradient

    def noise(self, theta: Tensor, start: Evaluation, slope: float, memory: Memory | None) -> float:
        """Standard deviation of the rounding error of a value; four forward passes.

        It is measured from values at close points along the gradient, as in KSD. See `noise_steps`
        for the distance of the points.
        """
        epsilon = self.objective.epsilon()
        step = first_step(slope, start.gradient, memory, self.ranks.agreed_number)

        def along_gradient(part: float) -> float:
            rows = []
            for back in noise_steps(epsilon):
                self.objective.parameters.assign(theta + part * back * step * start.gradient)
                with self.ranks.own_work():
                    rows.append(self.objective.comparable_losses(self.data))
                self.account.count(start.samples)
            return noise_over_ranks(rows, NOISE_POINTS, self.ranks) / start.normaliser

        noise = settled_noise(along_gradient, math.sqrt(epsilon) * abs(start.value))
        if not math.isfinite(noise):
            return epsilon * abs(start.value) / math.sqrt(start.samples)
        return noise
