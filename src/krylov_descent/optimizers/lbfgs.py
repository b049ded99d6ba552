"""Torch's L-BFGS behind the same `step(data)`."""

import copy
import math
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Samples
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.losses import Loss
from krylov_descent.objective.network import Forward
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
            one that returns their mean.
        params: the parameters to train, as torch.optim takes them; all of the model's by default.
        iterations: of L-BFGS in one step. A step begins with the gradient at the parameters as
            they are; its iterations share that cost.
        history: pairs of steps and changes of the gradient that are kept.
        weight_decay: λ of the L2 term ½λ‖θ‖², which belongs to the objective.
        lr: the first step that a line search tries, one for all parameters. Leave it at 1.
        seed: of nothing here, as the method draws no random numbers; all optimisers take one.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples handled at a time; by default as many as fit
            `activation_memory`.
        activation_memory: bytes that activations may take; 1 GiB on a CPU and a quarter of the
            free memory on a GPU by default.
        cuda_graphs: on a GPU, record the gradient once and replay it; False to run it as it is.

    Cost of a step: a gradient over the data for each evaluation, and a forward pass at the end.
    Memory beyond the model, the data and activations, in vectors of n numbers: 2·history, kept
    between steps in torch's own form (a list with the first parameter), and about ten more. With
    `cuda_graphs` a copy of the data and activations (up to 1 GiB) stay allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
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
    def step(self, data: None = None, *, closure: None = None) -> None: ...
    @overload
    def step(self, data: Any, *, closure: Closure | None = None) -> StepResult: ...

    def step(self, data: Any = None, *, closure: Closure | None = None) -> StepResult | None:
        """Some iterations of L-BFGS.

        Args:
            data: `(inputs, targets)`, a Dataset, a DataLoader or a list of batches. They are
                walked over several times and must be the same each time.
            closure: called once before the step, with its result and its gradients left alone;
                for frameworks that wrap an optimiser and pass one.

        Returns:
            What the step did. None for a call without data.

        The parameters change only if the objective went down; otherwise they are bit for bit as
        before, and the history is forgotten. So it is where parameters were frozen or thawed since
        the last step, or have another dtype or device. After any error all is as before.
        """
        if not self._wants_to_step(data, closure):
            return None
        samples = self._repeatable(data)
        with self._gradients_kept():
            return self._make_step(lambda _: self._search(samples))

    def _create_state(self) -> None:
        """Nothing: torch's L-BFGS makes its state as it goes."""

    def _let_state_follow(self) -> None:
        """Forget a history that is of other tensors, or of these in another dtype or place."""
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
            self.objective.scale = state.get(SCALE, 1.0)  # of the gradients in it

    @property
    def _trained(self) -> list[bool]:
        """Of each parameter, whether it is trained just now."""
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
            account.count(start.samples * evaluations.count)  # and the value, less the first one
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
        """Torch's optimiser over our state, of which it gets a copy of all that it writes into.

        It takes one group of parameters only; ours may differ in weight decay, which is the
        objective's affair. And it moves all that it is given, so frozen ones are left out.
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
        """By all steps so far, as torch counts them."""
        return sum(int(state.get("n_iter", 0)) for state in self.state.values())


def _copied(kept: Any) -> Any:
    """An entry of torch's state. Vectors in a list are not copied: torch never writes into them."""
    return kept.clone() if isinstance(kept, Tensor) else copy.copy(kept)


class _Evaluations:
    """The closure that torch's L-BFGS calls: value, and the gradient in `.grad`."""

    def __init__(self, optimizer: LBFGS, data: Samples, start: Evaluation) -> None:
        self._objective, self._data = optimizer.objective, data
        self._known: Evaluation | None = start  # at the parameters as they are
        self.count = 0

    def __call__(self) -> Tensor:
        found = self._known or self._objective.value_and_gradient(self._data)
        self._known = None
        self.count += 1
        parameters = self._objective.parameters
        for p, piece in zip(parameters.tensors, parameters.pieces(found.gradient), strict=True):
            p.grad = piece
        return torch.tensor(found.value, dtype=torch.float64)
