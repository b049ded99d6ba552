"""Mini-batch optimisers of torch.optim behind `step(data)`.

The wrapped optimiser computes its updates unchanged, bit for bit. The adapter adds what
`step(data)` promises: data in any form, a result that says what was done, and parameters restored
bit for bit if a number was not finite.
"""

import copy
import importlib
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Batch, InMemory, Samples, tensors_in
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.mini_batch import MiniBatch
from krylov_descent.objective.network import Forward
from krylov_descent.objective.term import LossOrTerms
from krylov_descent.optimizers.account import Account
from krylov_descent.optimizers.base import Closure, DataOptimizer, check_counters
from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.optimizers.snapshot import Snapshot
from krylov_descent.runtime.validation import check_counts

Schedule = Literal["constant", "linear"]


class FirstOrder(DataOptimizer):
    """Any mini-batch optimiser with the interface of torch.optim; a step is an epoch.

    Args:
        model: the module to train.
        loss: one of torch's losses, a callable `(outputs, targets) -> one number per sample`, or
            one that returns their mean; or a dict of `Term`s, which have their own samples.
        optimizer: a class, or its dotted import path such as "torch.optim.SGD".
        params: the parameters to train, as torch.optim takes them; all of the model's by default.
        batch_size: samples in a mini-batch; the last mini-batch of an epoch may have fewer.
        schedule: "constant" leaves the learning rate alone; "linear" lowers it after each
            mini-batch, to 0 at the end of `epochs`.
        epochs: the length of the linear schedule.
        clip_norm: the largest norm of a mini-batch gradient; longer gradients are scaled down to
            it. It is for recurrent nets, whose gradients explode now and then.
        seed: of the order of the samples.
        forward: `forward(model, inputs) -> outputs`, where calling the model is not enough.
        micro_batch: the most samples processed at a time; by default as many as fit
            `activation_memory`.
        activation_memory: the most bytes for activations; by default 1 GiB on a CPU and a quarter
            of the free memory on a GPU.
        cuda_graphs: on a GPU, record the gradient of a whole mini-batch once and replay it, so that
            small mini-batches do not wait for the host. It is only for models that run the same
            operations each time: a decision in Python within `forward` stays as it was recorded.
        **options: of the optimiser, such as `lr`, `betas`, `weight_decay`.

    The losses in the result are means over the epoch of the mini-batch losses before each update,
    so they cost nothing extra. `loss_after` is that mean for this epoch. `loss_before` is that mean
    for the previous epoch; in the first epoch it is the loss of the first mini-batch. Weight decay
    is applied by the wrapped optimiser and is not part of these losses.

    Cost of a step: one gradient over the data. Memory beyond the model, the data and activations:
    the optimiser's state twice and a copy of the parameters, for undoing an epoch. With
    `cuda_graphs` the activations of a mini-batch (up to 1 GiB) stay allocated.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossOrTerms,
        optimizer: type[torch.optim.Optimizer] | str = torch.optim.Adam,
        *,
        params: Any = None,
        batch_size: int = 128,
        schedule: Schedule = "constant",
        epochs: int | None = None,
        clip_norm: float | None = None,
        seed: int = 0,
        forward: Forward | None = None,
        micro_batch: int | None = None,
        activation_memory: int | None = None,
        cuda_graphs: bool = False,
        **options: Any,
    ) -> None:
        check_counts(batch_size=batch_size)
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"`clip_norm` must be above 0, found {clip_norm}")
        _check_schedule(schedule, epochs)
        kind = optimizer_class(optimizer)
        super().__init__(
            model,
            loss,
            params,
            {},
            seed=seed,
            forward=forward,
            micro_batch=micro_batch,
            activation_memory=activation_memory,
            cuda_graphs=cuda_graphs,
        )
        self.inner = kind(self.param_groups, **options)
        self._share()
        self.batch_size, self.schedule, self.epochs = batch_size, schedule, epochs
        self.clip_norm = clip_norm
        self.param_groups[0].setdefault("running_loss", None)
        if schedule == "linear":
            for group in self.param_groups:
                if "lr" not in group:
                    raise ValueError(f"`schedule`: {kind.__name__} has no learning rate to lower")
                group.setdefault("initial_lr", group["lr"])

    @overload  # type: ignore[override]
    def step(self, data: None = None, *, closure: Closure | None = None) -> Any: ...
    @overload
    def step(self, data: Any, *, closure: Closure | None = None) -> StepResult: ...

    def step(self, data: Any = None, *, closure: Closure | None = None) -> StepResult | None:
        """Make one epoch.

        Args:
            data: `(inputs, targets)`, a Dataset, a DataLoader or an iterable of batches. Indexable
                data are shuffled and cut into mini-batches here. The batches of a stream keep their
                order and are cut if they are too large.
            closure: called once before the step; its result and its gradients are ignored. It is
                for frameworks that wrap an optimiser and pass a closure.

        Returns:
            What the epoch did. None if there are neither data (given or bound) nor terms: such a
            call only creates the optimiser's state, as checkpoint tools expect.

        Unlike the methods with a search, an epoch may raise the loss. After an error parameters and
        state are restored bit for bit.
        """
        if not self._wants_to_step(data, closure):
            return None
        with self._gradients_kept():
            return self._make_step(lambda _: self._epoch(self._samples(data)))

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimiser's state; the adapter's own state is in the parameter groups."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; raises ValueError for one of another kind of optimiser."""
        check_counters(state_dict)
        self.inner.load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Let the adapter and the wrapped optimiser share state and parameter groups."""
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.defaults = self.inner.defaults

    def _restore(self, before: Snapshot) -> None:
        # Torch's optimisers write into their state, so `_epoch` restores it from a copy.
        before.restore_groups()
        before.restore_knowledge()

    def _create_state(self) -> None:
        if self.state:
            return
        # An update with a learning rate of 0 creates the state of any torch optimiser.
        before = [dict(group) for group in self.param_groups]
        for group in self.param_groups:
            group["lr"] = 0.0
        self.inner.step()
        for group, kept in zip(self.param_groups, before, strict=True):
            group.update(kept)

    def _epoch(self, samples: Samples) -> StepResult:
        account, parameters = Account(self.objective), self.objective.parameters
        before = self.param_groups[0]["running_loss"]
        theta = parameters.copy()
        state = copy.deepcopy(self.inner.state_dict())
        moved = False
        try:
            losses, normalisers, total = self._updates(samples)
            mean = float(losses.sum() / normalisers.sum())
            step_norm = length(parameters.copy() - theta)
            account.note(
                loss=mean,
                loss_before=float(losses[0] / normalisers[0]) if before is None else before,
                samples=total,
                objective_samples=total,
                iterations=len(losses),
                evaluations=len(losses),
            )
            account.count(total)
            account.lap("gradient")
            refused = self._refused(account, mean, step_norm)
            if refused is not None:
                return refused
            self.param_groups[0]["running_loss"] = mean
            account.note(step_norm=step_norm)
            result = account.moved("the epoch is over", loss_after=mean)
            moved = True
        finally:
            if not moved:
                parameters.assign(theta)
                self.load_state_dict(state)
        return result

    def _refused(self, account: Account, mean: float, step_norm: float) -> StepResult | None:
        """The result of an epoch that must be undone; None for any other epoch."""
        if not (math.isfinite(mean) and math.isfinite(step_norm)):
            reason = f"the mean loss is {mean}, the norm of the step {step_norm}"
            return account.refused(Status.NOT_FINITE, reason)
        if step_norm > 0:
            return None
        if all(group.get("lr") == 0 for group in self.param_groups):
            return account.refused(Status.NO_DECREASE, "the learning rate is 0")
        # The gradients of the last mini-batch.
        gradients = (p.grad for p in self.objective.parameters.tensors)
        if any(gradient is not None and bool(gradient.any()) for gradient in gradients):
            reason = "the updates are too small to change the parameters: scale the loss, or `lr`"
            return account.refused(Status.NO_DECREASE, reason)
        return account.refused(Status.STATIONARY)

    def _updates(self, samples: Samples) -> tuple[Tensor, Tensor, int]:
        """Make an update for each mini-batch, without waiting for the device.

        Returns:
            Σ nᵢ [batches] and Σ wᵢ [batches] of the mini-batches in float64, and the number of
            samples.
        """
        parameters = self.objective.parameters
        losses: list[Tensor] = []
        normalisers: list[Tensor] = []
        seen = 0
        for batch in _mini_batches(samples, self.batch_size, self._generator()):
            here = batch.to(parameters.device)
            if not losses:
                self.objective.probe(here)
            self._set_learning_rate(seen / len(samples) if samples.indexed else 0.0)
            # The smaller mini-batch at the end of an epoch is not worth preparing for.
            work = MiniBatch(self.objective, here, usual=here.size == self.batch_size)
            found = self.objective.engine.launch(work).result()
            for p, gradient in zip(parameters.tensors, found.gradients, strict=True):
                p.grad = gradient
            if self.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters.tensors, self.clip_norm)
            self.inner.step()
            losses.append(found.loss_sum)
            normalisers.append(found.normaliser)
            seen += batch.size
        if not losses:
            raise ValueError("`data` is empty: it must hold at least one sample")
        return torch.stack(losses).cpu(), torch.stack(normalisers).cpu(), seen

    def _set_learning_rate(self, part_of_epoch: float) -> None:
        if self.schedule == "linear":
            assert self.epochs is not None
            left = max(0.0, 1 - (self.steps + part_of_epoch) / self.epochs)
            for group in self.param_groups:
                group["lr"] = left * group["initial_lr"]


def _mini_batches(samples: Samples, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """The samples in random order, `size` at a time; a stream keeps its order."""
    if not samples.indexed:
        for batch in samples.batches():
            if batch.size:
                yield from batch.split(size)
        return
    order = torch.randperm(len(samples), generator=generator)
    if isinstance(samples, InMemory):
        # Copied to the device once per epoch, so that selecting a mini-batch waits for no copy.
        order = order.to(tensors_in((samples.batch.inputs, samples.batch.targets))[0].device)
    for indices in order.split(size):
        yield samples.select(indices).batch


def optimizer_class(given: type[torch.optim.Optimizer] | str) -> type[torch.optim.Optimizer]:
    """The optimiser class itself, or the class at a dotted import path.

    Raises:
        ValueError: nothing is found at the path.
        TypeError: not a class of torch optimisers, or torch's LBFGS.
    """
    found: Any = given
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as problem:
            raise ValueError(
                f"`optimizer`: nothing found at {given!r} ({problem}); give a class or its full "
                "dotted path, such as 'torch.optim.SGD'"
            ) from problem
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise TypeError(f"`optimizer` must be a class of torch optimisers, found {given!r}")
    if issubclass(found, torch.optim.LBFGS):
        raise TypeError("`optimizer`: LBFGS needs the full batch; use krylov_descent.LBFGS")
    return found


def _check_schedule(schedule: Schedule, epochs: int | None) -> None:
    if schedule not in get_args(Schedule):
        raise ValueError(
            f"`schedule` must be one of {', '.join(map(repr, get_args(Schedule)))}, "
            f"found {schedule!r}"
        )
    if schedule == "linear" and (epochs is None or epochs < 1):
        raise ValueError(
            f"`schedule='linear'` needs `epochs`, the number of epochs to reach 0, found {epochs}"
        )
    if schedule == "constant" and epochs is not None:
        raise ValueError("`epochs` belongs to `schedule='linear'`: leave it out or give that")
