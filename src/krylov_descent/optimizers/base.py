"""The base class of all optimisers: `step(data)` within the torch.optim contract.

Second-order methods evaluate the data several times in a step, so `step` takes the data, where
torch.optim takes gradients. Parameter groups, hooks, schedulers and `state_dict` work as in torch.
The state of a parameter has the parameter's shape and lives in `state`. Counters live in
`param_groups[0]`, because checkpoint tools allow nothing else in `state` and cast it to the
parameter's dtype.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import torch
from torch import Tensor, nn

from krylov_descent.objective.batches import Samples, Unusable, as_samples
from krylov_descent.objective.buffers import buffers_kept
from krylov_descent.objective.network import Forward
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.term import LossOrTerms
from krylov_descent.objective.terms import OF_TERMS
from krylov_descent.optimizers import bound_data, shared_settings, term_steps
from krylov_descent.optimizers.bound_data import BoundData, has_gradients, is_closure
from krylov_descent.optimizers.call_checks import check_call
from krylov_descent.optimizers.result import StepResult
from krylov_descent.optimizers.snapshot import Snapshot
from krylov_descent.optimizers.state_vectors import StateVectors
from krylov_descent.runtime.engine import Engine, StaleError
from krylov_descent.runtime.private import holds_hooks
from krylov_descent.runtime.process_group import ProcessGroup
from krylov_descent.runtime.rank_agreement import check_alike, check_nobody_has_data
from krylov_descent.runtime.threads import step_turn
from krylov_descent.runtime.validation import check_flags, check_not_negative, check_whole

Closure = Callable[[], Any]

# An odd number with well-spread bits, so that no step of one seed has the generator of a step of a
# neighbouring seed.
SEED_STRIDE = 0x9E3779B97F4A7C15
# Keeps a rank's generator apart from those of neighbouring seeds on other ranks.
RANK_STRIDE = 1_000_003

# What to do where ranks differ, by the beginning of the name of what differs.
ADVICE = {OF_TERMS: "give every rank the same terms with all their points; each computes its share"}


class DataOptimizer(StateVectors):
    """A torch optimiser whose `step` takes the data.

    Args:
        model: the module to train.
        loss: see `krylov_descent.objective.losses`.
        params: the parameters to train, as torch.optim takes them; all of the model's by default.
        defaults: of the parameter groups.
        seed: of the optimiser's own random numbers.
        forward: see `Objective`.
        micro_batch: see `Objective`.
        activation_memory: see `Objective`.
        cuda_graphs: whether the engine for a GPU may record work and replay it.
        process_group: see `Objective`.

    Attributes:
        last_result: what the last step returned, for frameworks that drop it; None before a step.
    """

    # Whether a step sums over the ranks of a process group.
    data_parallel = False

    # Entries of the first parameter group that steps write. Rounding may make them differ between
    # ranks, so all ranks take rank 0's. All other entries are the user's and must be equal.
    learnt: tuple[str, ...] = ()

    # Makes GradScaler call `step` directly, so that `step` can refuse it with a clear message.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        loss: LossOrTerms,
        params: Any,
        defaults: dict[str, Any],
        *,
        seed: int,
        forward: Forward | None,
        micro_batch: int | None,
        activation_memory: int | None,
        cuda_graphs: bool = True,
        process_group: ProcessGroup = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"`model` must be a torch.nn.Module, found {type(model).__name__}: give the model "
                "itself, and the loss after it"
            )
        given = list(model.named_parameters()) if params is None else params
        if params is None and not given:
            raise ValueError("`model` has no parameters: there is nothing to train")
        check_whole(seed=seed)
        check_flags(cuda_graphs=cuda_graphs)
        super().__init__(given, defaults)
        self._check_groups()
        self.objective = Objective(
            model,
            loss,
            forward=forward,
            params=self.param_groups,
            micro_batch=micro_batch,
            activation_memory=activation_memory,
            process_group=process_group,
        )
        self.last_result: StepResult | None = None
        self._bound = BoundData()
        self._cuda_graphs = cuda_graphs
        self._plain_engine = self.objective.engine
        self._cuda_engine: Engine | None = None
        self.param_groups[0].setdefault("seed", int(seed))
        self.param_groups[0].setdefault("steps", 0)
        self._engine()  # on a GPU kernels begin to load

    def bind(self, data: Any) -> Self:
        """Give the data once, for frameworks that call `step()` or `step(closure)`.

        A closure is called once before the step. What it returns is ignored, and it must not call
        `backward()`.

        Args:
            data: as for `step`; None to bind none. They are not in the state dict.

        Returns:
            The optimiser itself.

        Raises:
            TypeError: the data can be iterated over only once, or the optimiser has terms.
            ValueError: the data are no batch.
        """
        if self.objective.terms is not None:
            raise TypeError("terms have their own points and data: call optimizer.step() at once")
        self._bound.bind(data)
        return self

    def step(self, data: Any = None, *, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """Make one step on the data.

        Args:
            data: the samples; each method says in which forms.
            closure: called once before the step.

        Returns:
            A `StepResult`. None for a call without data, given or bound, which only creates the
            optimiser's state, as checkpoint tools expect.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        # Everything, including the model, so that a copy can step. Hooks are left out, as in torch,
        # and so is the `step` attribute that an LR scheduler wraps around the method.
        return {
            name: value
            for name, value in vars(self).items()
            if name != "step" and not holds_hooks(name)
        }

    def _check_groups(self) -> None:
        """Raise ValueError for unusable entries; the user may change or load groups at any time."""
        for group in self.param_groups:
            for key in ("lr", "weight_decay"):
                # The groups of a wrapped torch optimiser may lack the key.
                check_not_negative(**{key: group.get(key, 0.0)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict.

        Raises:
            ValueError: the state is of another kind of optimiser. The optimiser is unchanged then.
        """
        check_counters(state_dict)
        super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """The state as in torch. Later steps do not change it, because they store new tensors."""
        found = super().state_dict()
        return found | {"state": {key: copy.copy(kept) for key, kept in found["state"].items()}}

    @property
    def steps(self) -> int:
        """The number of steps so far, including refused ones."""
        return int(self.param_groups[0]["steps"])

    def _generator(self, rank: int = 0) -> torch.Generator:
        """A random generator for this step; resuming needs only the seed and the step counter.

        Args:
            rank: different ranks get different random numbers.
        """
        seed = int(self.param_groups[0]["seed"]) + rank * RANK_STRIDE
        return torch.Generator().manual_seed((seed * SEED_STRIDE + self.steps) % 2**63)

    def _wants_to_step(self, data: Any, closure: Any) -> bool:
        """Check the arguments of `step`; False for a call without data, which creates the state.

        If there are data and a closure, the closure is called once. Frameworks that wrap the
        optimiser pass a closure that computes gradients and calls their hooks. Its result and the
        gradients are ignored.
        """
        check_call(self, closure)
        if self.objective.terms is not None:
            return term_steps.begin(self, data, closure)
        if self._bound.serves(data, closure):
            return bound_data.begin(self, data if closure is None else closure)
        if is_closure(data) or (data is None and closure is not None):
            raise TypeError(
                f"{type(self).__name__} needs the data, and a closure does not give them: call "
                "optimizer.step(data), or optimizer.step(data=data, closure=closure) where a "
                "framework passes a closure, or first optimizer.bind(data) where it calls "
                "step() by itself, with data = (inputs, targets), a Dataset or a DataLoader"
            )
        if data is not None:
            if closure is not None:
                with torch.enable_grad():  # as torch.optim does
                    closure()
            return True
        if has_gradients(self.param_groups):
            raise TypeError(
                f"{type(self).__name__} needs the data and makes its own gradients: call "
                "optimizer.step(data), without loss.backward()"
            )
        self._create_state()
        return False

    def _create_state(self) -> None:
        """Create the per-parameter state, into which a checkpoint can be loaded."""
        raise NotImplementedError

    def _begins(self, data: Any, closure: Any) -> bool:
        """`_wants_to_step` for several ranks: the answer is the same on all ranks.

        An error on one rank is kept, and the check at the start of the step reports it to all
        ranks.
        """
        ranks = self.objective.ranks
        alone = not (self.data_parallel and ranks.size > 1)
        try:
            wanted = self._wants_to_step(data, closure)
        except Exception as problem:
            if alone:
                raise
            ranks.fail(problem)
            return True
        tensors = (p for group in self.param_groups for p in group["params"])
        # Checkpoint tools set gradients to zero first, and may call `step` on a single rank.
        if not (wanted or alone or any(p.grad is not None for p in tensors)):
            check_nobody_has_data(ranks)
        return wanted

    @contextmanager
    def _working(self, engine: Engine | None = None, **given: Any) -> Iterator[Objective]:
        """Context manager around a step: checks, locks and settings. An error undoes everything.

        Within it autograd is on, autocast applies to forward passes alone, and changes of buffers
        are undone at the end.

        Args:
            engine: that runs the work; by default the engine for the parameters' device.
            given: optional sets of samples by argument name, None if left out. All ranks must give
                the same sets, which may be empty.
        """
        ranks = self.objective.ranks
        before = Snapshot(self, self._learners(), self._foreign())
        try:
            self.check_group()
            with ranks.own_work():
                self._check_groups()
                self.objective.refresh(self.param_groups)
                self.objective.engine = engine or self._engine()
                self._let_state_follow()
                term_steps.draw(self.objective, self.param_groups[0], given)
            number = self._check_alike(given) if ranks.together else 0
            network = self.objective.network
            with (
                step_turn(network.parameters.device),
                ranks.step(number),
                torch.enable_grad(),
                network.algebra(),
                buffers_kept(network.model),
            ):
                term_steps.evaluate(self.objective, self.param_groups[0])
                with self.objective.scaled(), self.objective.engine.step():
                    yield self.objective
                    ranks.settle()
        except BaseException:
            self._restore(before)
            raise
        finally:
            # The other engine refers to the objective: a cycle of references would keep its memory.
            self.objective.engine = self._plain_engine
        self.param_groups[0]["steps"] = self.steps + 1

    def _make_step(self, iterate: Callable[[Objective], StepResult], **given: Any) -> StepResult:
        """Make a step, which is undone if it fails and repeated if the engine's caches were stale.

        Args:
            iterate: makes the step, given the objective.
            given: see `_working`.
        """
        with suppress(StaleError):
            self.last_result = self._attempt(iterate, None, given)
            return self.last_result
        self._engine().clear()
        # The eager engine has no caches, so the second attempt cannot be stale.
        self.last_result = self._attempt(iterate, Engine(), given)
        return self.last_result

    def _attempt(
        self,
        iterate: Callable[[Objective], StepResult],
        engine: Engine | None,
        given: dict[str, Any],
    ) -> StepResult:
        with self._working(engine, **given) as objective:
            return term_steps.reported(iterate(objective), objective.terms)

    def _engine(self) -> Engine:
        """The engine for the device that the parameters are on now."""
        if self.objective.parameters.device.type != "cuda" or not self._cuda_graphs:
            return self._plain_engine
        if self._cuda_engine is None:
            from krylov_descent.cuda.engine import CudaEngine

            self._cuda_engine = CudaEngine(self.objective)
        return self._cuda_engine

    def _check_alike(self, given: dict[str, Any]) -> int:
        """Raise if ranks differ, and take rank 0's learnt numbers; returns the step's number."""
        ranks, group = self.objective.ranks, self.param_groups[0]
        keys = [key for key in self.learnt if key in group]
        settings, tensors = dict[str, str](), dict[str, Tensor]()
        with ranks.own_work():
            tensors = shared_settings.tensors(self.objective)
            settings = shared_settings.texts(self, self._options(), given, tensors)
        learnt = [float(group[key]) for key in keys]
        step, numbers = check_alike(ranks, settings, tensors, learnt, ADVICE)
        for key, number in zip(keys, numbers, strict=True):
            group[key] = type(group[key])(number)
        return step

    def _learners(self) -> list[object]:
        """The objects that learn about model and data in a step, and so affect the next step."""
        return self.objective.learners

    def _foreign(self) -> list[object]:
        """The learners that are the user's objects."""
        return []

    def _restore(self, before: Snapshot) -> None:
        """Undo a failed step; the parameters have been restored already."""
        before.restore_groups()
        before.restore_state()
        before.restore_knowledge()

    def check_group(self) -> None:
        """Check that the optimiser can work with the current process group.

        Raises:
            RuntimeError: the group changed after the optimiser was made, or it has several ranks
                and the method does not sum over ranks.
        """
        name, ranks = type(self).__name__, self.objective.ranks
        ranks.check_group(name)
        if ranks.size > 1 and not self.data_parallel:
            raise RuntimeError(
                f"{name} does not sum over ranks, and there are {ranks.size}: train with KSD, "
                "HessianFree or NonlinearCG, or in one process"
            )

    def _options(self) -> dict[str, Any]:
        """Settings outside the parameter groups that must be equal on all ranks."""
        return {}

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Context manager: `.grad` is None within it, and restored afterwards."""
        tensors = [p for group in self.param_groups for p in group["params"]]
        before = [p.grad for p in tensors]
        for p in tensors:
            p.grad = None
        try:
            yield
        finally:
            for p, gradient in zip(tensors, before, strict=True):
                p.grad = gradient

    def _samples(self, data: Any, argument: str = "data", *, repeatable: bool = False) -> Samples:
        """The data, or this rank's shard of them, which may be empty.

        A single process raises an error in the data at once. With several ranks the next sum over
        ranks reports it, which ends the step on all ranks.
        """
        ranks, terms = self.objective.ranks, self.objective.terms
        if terms is not None and terms.samples is not None:
            return terms.samples
        if argument == "data" and self._bound.serves(data):
            data = self._bound.data
        try:
            if repeatable and isinstance(data, Iterator):
                raise TypeError(
                    f"{type(self).__name__} walks over `{argument}` several times in a step, and a "
                    f"{type(data).__name__} can be walked over only once: give (inputs, targets), "
                    "a Dataset, a DataLoader or a list of batches"
                )
            return as_samples(data, argument, may_be_empty=ranks.together)
        except Exception as problem:
            if not ranks.together:
                raise
            return Unusable(problem)

    def _repeatable(self, data: Any) -> Samples:
        """The data for a method that iterates over them several times in a step."""
        return self._samples(data, repeatable=True)


def check_counters(state_dict: dict[str, Any]) -> None:
    """Raise ValueError for a state dict that no optimiser of this library wrote."""
    group = (state_dict.get("param_groups") or [{}])[0]
    missing = [name for name in ("seed", "steps") if name not in group]
    if missing:
        raise ValueError(
            f"`state_dict` is not that of an optimiser of this kind: its first parameter group has "
            f"no {' and no '.join(map(repr, missing))}"
        )
