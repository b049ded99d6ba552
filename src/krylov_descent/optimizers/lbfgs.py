"""Torch's L-BFGS behind `step(data)`."""

import copy
import math
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Samples
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.network import Forward
from krylov_descent.objective.term import LossOrTerms
from krylov_descent.optimizers.account import Account
from krylov_descent.optimizers.base import Closure, DataOptimizer
from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.runtime.validation import check_counts

TRAINED, SCALE = "trained", "scale"


class LBFGS(DataOptimizer):
    """Torch's L-BFGS with its strong Wolfe line search, on the full batch.

    Args:
        model: the module to train.
        loss: one of torch's losses, a callable `(outputs, targets) -> one number per sample`, or
            one that returns their mean; or a dict of `Term`s, which have their own samples.
        params: the parameters to train, as torch.optim takes them; all of the model's by default.
        iterations: of L-BFGS in one step. Each step begins with a new gradient, whose cost the
            iterations share.
        history: how many pairs of steps and gradient changes are kept.
        weight_decay: λ of the L2 term ½λ‖θ‖², which is part of the objective.
        lr: the first step size that a line search tries, one for all parameters. Leave it at 1.
        seed: of the random signs that measure the gradient's noise when no decrease was found. The
            search itself draws no random numbers.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples processed at a time; by default as many as fit
            `activation_memory`.
        activation_memory: the most bytes for activations; by default 1 GiB on a CPU and a quarter
            of the free memory on a GPU.
        cuda_graphs: on a GPU, record the gradient once and replay it; False runs it eagerly.

    Cost of a step: a gradient over the data for each evaluation, and a forward pass at the end.
    Memory beyond the model, the data and activations, in vectors of n numbers: 2·history, kept
    between steps in torch's own form (a list in the state of the first parameter), and about ten
    more. With `cuda_graphs` a copy of the data and activations (up to 1 GiB) stay allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossOrTerms,
        params: Any = None,
        *,
        iterations: int = 20,
        history: int = 10,
        weight_decay: float = 0.0,
        lr: float = 1.0,
        seed: int = 0,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        check_counts(iterations=iterations, history=history)
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
        )
        self.iterations, self.history = iterations, history

    @overload  # type: ignore[override]
    def step(self, data: None = None, *, closure: Closure | None = None) -> Any: ...
    @overload
    def step(self, data: Any, *, closure: Closure | None = None) -> StepResult: ...

    def step(self, data: Any = None, *, closure: Closure | None = None) -> StepResult | None:
        """Make up to `iterations` iterations of L-BFGS.

        Args:
            data: `(inputs, targets)`, a Dataset, a DataLoader or a list of batches. They are
                iterated over several times and must be the same each time.
            closure: called once before the step; its result and its gradients are ignored. It is
                for frameworks that wrap an optimiser and pass a closure.

        Returns:
            What the step did. None if there are neither data (given or bound) nor terms.

        The parameters change only if the objective went down. Otherwise they stay as they were, bit
        for bit, and the history is cleared. The history is also cleared if parameters were frozen
        or unfrozen since the last step, or have another dtype or device. After an error parameters
        and state are restored.
        """
        if not self._wants_to_step(data, closure):
            return None
        with self._gradients_kept():
            return self._make_step(lambda _: self._search(self._repeatable(data)))

    def _create_state(self) -> None:
        """Nothing: torch's L-BFGS creates its state in its first step."""

    def _let_state_follow(self) -> None:
        """Clear a history that belongs to other tensors, another dtype or another device."""
        parameters = self.objective.parameters
        state = self.state.get(parameters.tensors[0], {})
        last = state.get("prev_flat_grad")
        if (
            last is None
            or (last.dtype, last.device) != (parameters.dtype, parameters.device)
            or state.get(TRAINED) != self._trained
        ):
            self.state.clear()
        else:
            self.objective.scale = state.get(SCALE, 1.0)  # of the gradients in the history

    @property
    def _trained(self) -> list[bool]:
        """For each parameter, whether it requires a gradient now."""
        return [p.requires_grad for group in self.param_groups for p in group["params"]]

    def _search(self, data: Samples) -> StepResult:
        objective = self.objective
        account = Account(objective)
        start, norm = account.begin(partial(objective.value_and_gradient, data))
        account.note(evaluations=1)
        if not (math.isfinite(start.value) and math.isfinite(norm)):
            return account.refused(
                Status.NOT_FINITE, f"the loss is {start.value} and its gradient's norm {norm}"
            )
        if norm == 0:
            return account.refused(Status.STATIONARY)
        rate = float(self.param_groups[0]["lr"])
        if rate == 0:
            return account.refused(Status.NO_DECREASE, "the learning rate is 0")
        if any(kept.get(SCALE, 1.0) != objective.scale for kept in self.state.values()):
            self.state.clear()

        theta = objective.parameters.copy()
        evaluations = _Evaluations(self, data, start)
        result = None
        try:
            made = self._iterations_made
            self._torchs(rate).step(evaluations)
            after = objective.value(data)
            account.note(evaluations=evaluations.count)
            account.count(start.samples * evaluations.count)  # count - 1 gradients, one value
            if after < start.value:
                account.note(
                    iterations=self._iterations_made - made,
                    step_norm=length(objective.parameters.copy() - theta),
                )
                reason = "the iterations of this step are made"
                result = account.moved(reason, loss_after=after)
        finally:
            if result is None:
                objective.parameters.assign(theta)
        if result is None:
            self.state.clear()
            why = "torch's line search found no lower value"
            return account.no_decrease(why, data, theta, self._generator())
        return result

    def _torchs(self, rate: float) -> torch.optim.LBFGS:
        """Torch's optimiser on our state, with copies of the tensors that it writes into.

        Torch's L-BFGS takes a single parameter group. Our groups differ in weight decay, which is
        part of the objective. Torch's L-BFGS moves all parameters it is given, so frozen ones are
        left out.
        """
        tensors = self.objective.parameters.tensors
        state = {key: _copied(kept) for key, kept in self.state.get(tensors[0], {}).items()}
        self.state[tensors[0]] = state | {TRAINED: self._trained, SCALE: self.objective.scale}
        optimizer = torch.optim.LBFGS(
            tensors,
            lr=rate,
            max_iter=self.iterations,
            history_size=self.history,
            line_search_fn="strong_wolfe",
        )
        optimizer.state = self.state
        return optimizer

    @property
    def _iterations_made(self) -> int:
        """The number of iterations in all steps so far, as torch counts them."""
        return sum(int(state.get("n_iter", 0)) for state in self.state.values())


def _copied(kept: Any) -> Any:
    """Copy an entry of torch's state. Tensors in a list are shared: torch only reads them."""
    return kept.clone() if isinstance(kept, Tensor) else copy.copy(kept)


class _Evaluations:
    """The closure for torch's L-BFGS: returns the value and stores the gradient in `.grad`."""

    def __init__(self, optimizer: LBFGS, data: Samples, start: Evaluation) -> None:
        self._objective, self._data = optimizer.objective, data
        self._known: Evaluation | None = start  # the evaluation at the current parameters
        self.count = 0

    def __call__(self) -> Tensor:
        found = self._known or self._objective.value_and_gradient(self._data)
        self._known = None
        self.count += 1
        parameters = self._objective.parameters
        for p, piece in zip(parameters.tensors, parameters.pieces(found.gradient), strict=True):
            p.grad = piece
        return torch.tensor(found.value, dtype=torch.float64)
