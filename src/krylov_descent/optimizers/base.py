"""What every optimiser here has in common: `step(data)` inside the torch.optim contract.

Second-order methods look at the data several times in a step, so they take the data, where
torch.optim takes gradients. All the rest is as users and tools expect of a torch optimiser:
parameter groups, hooks, schedulers, `state_dict`. State that belongs to a parameter has its
shape and lives in `state`; counters live in `param_groups[0]`, since checkpoint tools allow
nothing else in `state` and cast what is there to the parameter's dtype.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from krylov_descent.objective.batches import Samples, Unusable, as_samples
from krylov_descent.objective.contract_probe import buffers_kept
from krylov_descent.objective.losses import Loss
from krylov_descent.objective.network import Forward
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.result import StepResult
from krylov_descent.optimizers.snapshot import Snapshot
from krylov_descent.optimizers.state_vectors import StateVectors
from krylov_descent.runtime.descriptions import described, described_modules, name_of, tensors_of
from krylov_descent.runtime.engine import Engine, StaleError
from krylov_descent.runtime.private import holds_hooks
from krylov_descent.runtime.rank_agreement import check_alike, check_nobody_has_data
from krylov_descent.runtime.ranks import ProcessGroup
from krylov_descent.runtime.threads import step_turn
from krylov_descent.runtime.validation import check_flags, check_not_negative, check_whole

Closure = Callable[[], Any]

# An odd number with well-spread bits, so that neighbouring seeds share no step's generator.
SEED_STRIDE = 0x9E3779B97F4A7C15
# And so that a rank's generator is none that a neighbouring seed has on another rank.
RANK_STRIDE = 1_000_003


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
        cuda_graphs: on a GPU, whether the engine there may record work and replay it.
        process_group: see `Objective`.
    """

    # Whether a step sums over the ranks of a process group.
    data_parallel = False

    # Entries of the first parameter group that steps write. Rounding may make them differ from rank
    # to rank, so rank 0's count. All other entries are the user's, and must be the same.
    learnt: tuple[str, ...] = ()

    # Tells GradScaler to call `step` itself, which then can refuse it in a clear sentence.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
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
            raise TypeError(f"`model` must be a torch.nn.Module, found {type(model).__name__}")
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
        self._cuda_graphs = cuda_graphs
        self._plain_engine = self.objective.engine
        self._cuda_engine: Engine | None = None
        self.param_groups[0].setdefault("seed", int(seed))
        self.param_groups[0].setdefault("steps", 0)

    def step(self, data: Any = None, *, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """One iteration on the data; returns a `StepResult`.

        Without data, as checkpoint tools call it, it creates the optimiser's state and returns
        None. A closure is called once before the step.
        """
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        # All of it, with the model, so that a copy can step. Hooks stay behind, as torch has it,
        # and so does the `step` that an LR scheduler wraps around ours.
        return {
            name: value
            for name, value in vars(self).items()
            if name != "step" and not holds_hooks(name)
        }

    def _check_groups(self) -> None:
        """Refuse what no step can work with; groups may be written to, and loaded, at any time."""
        for group in self.param_groups:
            for key in ("lr", "weight_decay"):
                # A torch optimiser behind an adapter may not have the key at all.
                check_not_negative(**{key: group.get(key, 0.0)})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch has it; refuses the state of another kind of optimiser, and stays as it was."""
        check_counters(state_dict)
        super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """As torch has it, but steps leave it alone: they put new tensors into the state."""
        found = super().state_dict()
        return found | {"state": {key: copy.copy(kept) for key, kept in found["state"].items()}}

    @property
    def steps(self) -> int:
        """How many steps were made so far, refused ones included."""
        return int(self.param_groups[0]["steps"])

    def _generator(self, rank: int = 0) -> torch.Generator:
        """Random numbers of this step alone, so that resuming needs only seed and counter.

        Args:
            rank: another one gives other numbers.
        """
        seed = int(self.param_groups[0]["seed"]) + rank * RANK_STRIDE
        return torch.Generator().manual_seed((seed * SEED_STRIDE + self.steps) % 2**63)

    def _wants_to_step(self, data: Any, closure: Any) -> bool:
        """Whether there is work; False for the empty call with which tools create the state.

        Where there is work, a closure is called, once. Frameworks that wrap the optimiser pass one
        that makes gradients and calls their hooks. What it returns, and the gradients, are theirs.
        """
        if hasattr(self, "grad_scale"):
            vars(self).pop("grad_scale"), vars(self).pop("found_inf", None)
            raise RuntimeError(
                f"{type(self).__name__} does not work with GradScaler: it computes its own "
                "gradients and needs no loss scaling. Call optimizer.step(data), and use "
                "torch.autocast with bfloat16 where a low-precision forward pass is wanted"
            )
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{type(self).__name__} needs gradients, which torch.inference_mode() rules out: "
                "call optimizer.step outside of it, or use torch.no_grad() in its place"
            )
        is_data = isinstance(data, Dataset | DataLoader) or not callable(data)
        if not is_data or (data is None and closure is not None):
            raise TypeError(
                f"{type(self).__name__} needs the data, and a closure does not give them: call "
                "optimizer.step(data), or optimizer.step(data=data, closure=closure) where a "
                "framework passes a closure, with data = (inputs, targets), a Dataset or a "
                "DataLoader"
            )
        if closure is not None and not callable(closure):
            raise TypeError(
                f"`closure` must be callable, or None, found {type(closure).__name__}: give the "
                "data as the first argument"
            )
        if data is not None:
            if closure is not None:
                with torch.enable_grad():  # as torch.optim calls it
                    closure()
            return True
        if any(
            p.grad is not None and bool(p.grad.any())
            for group in self.param_groups
            for p in group["params"]
        ):
            raise TypeError(
                f"{type(self).__name__} needs the data and makes its own gradients: call "
                "optimizer.step(data), without loss.backward()"
            )
        self._create_state()
        return False

    def _create_state(self) -> None:
        """Make the per-parameter state that a checkpoint can be loaded into."""
        raise NotImplementedError

    def _begins(self, data: Any, closure: Any) -> bool:
        """Whether there is work, as `_wants_to_step` says, on all ranks alike.

        What a rank is refused is told to the others by the check with which a step begins.
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
        # Checkpoint tools make gradients of zeros first, and may ask on one rank alone.
        if not (wanted or alone or any(p.grad is not None for p in tensors)):
            check_nobody_has_data(ranks)
        return wanted

    @contextmanager
    def _working(self, engine: Engine | None = None, **given: Any) -> Iterator[Objective]:
        """Autograd on, autocast for the forward pass alone, buffers as before at the end.

        An error on the way leaves the optimiser as it was.

        Args:
            engine: that runs the work; by default the one for the parameters' device.
            given: sets of samples by the name of their argument, None where there is none: all
                ranks must give the same ones, though perhaps empty.
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
            number = self._check_alike(given) if ranks.together else 0
            network = self.objective.network
            with (
                step_turn(network.parameters.device),
                ranks.step(number),
                torch.enable_grad(),
                network.algebra(),
                buffers_kept(network.model),
                self.objective.scaled(),
                self.objective.engine.step(),
            ):
                yield self.objective
                ranks.settle()
        except BaseException:
            self._restore(before)
            raise
        self.param_groups[0]["steps"] = self.steps + 1

    def _make_step(self, iterate: Callable[[Objective], StepResult], **given: Any) -> StepResult:
        """A step, undone if it fails.

        Args:
            iterate: makes it, given the objective.
            given: see `_working`.
        """
        try:
            with self._working(**given) as objective:
                return iterate(objective)
        except StaleError:
            self._engine().clear()
        # Once more, each piece of work as it is: nothing can be stale then.
        with self._working(Engine(), **given) as objective:
            return iterate(objective)

    def _engine(self) -> Engine:
        """The engine for the device that the parameters are on now."""
        if self.objective.parameters.device.type != "cuda" or not self._cuda_graphs:
            return self._plain_engine
        if self._cuda_engine is None:
            from krylov_descent.cuda.engine import CudaEngine

            self._cuda_engine = CudaEngine(self.objective)
        return self._cuda_engine

    def _check_alike(self, given: dict[str, Any]) -> int:
        """Refuse ranks that differ, and go on from rank 0's numbers; the number of the step."""
        ranks, group = self.objective.ranks, self.param_groups[0]
        keys = [key for key in self.learnt if key in group]
        settings, tensors = dict[str, str](), dict[str, Tensor]()
        with ranks.own_work():
            settings, tensors = self._description(given), self._tensors()
        step, numbers = check_alike(ranks, settings, tensors, [float(group[key]) for key in keys])
        for key, number in zip(keys, numbers, strict=True):
            group[key] = type(group[key])(number)
        return step

    def _learners(self) -> list[object]:
        """What learns about model and data in a step, so that the next one depends on it."""
        return self.objective.learners

    def _foreign(self) -> list[object]:
        """What of it is not this library's."""
        return []

    def _restore(self, before: Snapshot) -> None:
        """Undo a step that failed; the parameters are as before by now."""
        before.restore_groups()
        before.restore_state()
        before.restore_knowledge()

    def check_group(self) -> None:
        """Refuse a process group that came too late, or one that the method does not sum over."""
        name, ranks = type(self).__name__, self.objective.ranks
        ranks.check_group(name)
        if ranks.size > 1 and not self.data_parallel:
            raise RuntimeError(
                f"{name} does not sum over ranks, and there are {ranks.size}: train with KSD, "
                "HessianFree or NonlinearCG, or in one process"
            )

    def _options(self) -> dict[str, Any]:
        """Settings that are no entry of a parameter group and must be the same on all ranks."""
        return {}

    def _description(self, given: dict[str, Any]) -> dict[str, str]:
        """All that must be the same on every rank, as words."""
        network = self.objective.network
        told: dict[str, Any] = {"the optimiser": type(self).__name__, **self._options()}
        for name, data in given.items():
            told[f"`{name}`"] = "left out" if data is None else "given"
        told |= described("the loss", network.loss.module)
        told["`forward`"] = name_of(network.forward)
        for name, tensor in self._tensors().items():
            told[name] = f"{tuple(tensor.shape)} {tensor.dtype}"
        for index, group in enumerate(self.param_groups):
            for key, value in group.items():
                if key not in ("params", "param_names", *self.learnt):
                    told[f"`{key}` of parameter group {index}"] = value
        told |= described_modules(network.eager)
        told["the order of what is trained"] = ", ".join(network.names)
        return {name: str(value) for name, value in told.items()}

    def _tensors(self) -> dict[str, Tensor]:
        """All that the loss depends on besides the data, by name."""
        network = self.objective.network
        trained = set(network.names)
        found: dict[str, Tensor] = {
            f"the {'' if name in trained else 'frozen '}parameter {name}": p
            for name, p in network.eager.named_parameters()
        }
        found |= {f"the buffer {name}": b for name, b in network.eager.named_buffers()}
        return found | tensors_of("the loss", network.loss.module)

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """`.grad` is None for a while, and afterwards as it was."""
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
        """The data, or this rank's share of them, which may be empty.

        With several ranks what is wrong is told in the first sum over them, and ends them all.
        """
        ranks = self.objective.ranks
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
        """The data for a method that walks over them several times in a step."""
        return self._samples(data, repeatable=True)


def check_counters(state_dict: dict[str, Any]) -> None:
    """Refuse a state that none of these optimisers wrote."""
    group = (state_dict.get("param_groups") or [{}])[0]
    missing = [name for name in ("seed", "steps") if name not in group]
    if missing:
        raise ValueError(
            f"`state_dict` is not that of an optimiser of this kind: its first parameter group has "
            f"no {' and no '.join(map(repr, missing))}"
        )
