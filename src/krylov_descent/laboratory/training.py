"""The only training loop: step, measure, record, decide whether to go on.

Seconds are those of the steps alone; drawing samples, measuring errors and writing checkpoints is
not training. Beside the clock's there are those that the processor worked for this process, on all
of its threads: where they are far fewer, the machine was busy with something else.
A run goes on exactly where its checkpoint is: what was recorded after it is dropped and done
again, with the same numbers.

On several ranks each has its own part of the data, and errors are those of all parts. Rank 0
alone reads and writes the folder, and decides when time is over.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from krylov_descent.laboratory.accounting import account, busy_machine
from krylov_descent.laboratory.checkpoint import (
    CheckpointError,
    load_checkpoint,
    save_atomically,
)
from krylov_descent.laboratory.limits import Ending, Limits
from krylov_descent.laboratory.problems.problem import Problem, Split
from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.runtime.ranks import Ranks

METRIC_BATCH = 5_000
# A step, and the phases of it that some methods tell.
STEP, PHASES = "step", ("gradient", "basis", "cg", "search")
# What has been spent before the first row.
START: Row = {"seconds": 0.0, "cpu_seconds": 0.0, "passes": 0.0}
# Called with each row as it is recorded, and with the step behind it (None for the start).
OnRow = Callable[[Row, StepResult | None], None]


class Training:
    """One run: a problem, a model and an optimiser, recorded in a folder.

    Args:
        problem: with its data where the model is.
        model: is trained in place.
        optimizer: any with `step(data) -> StepResult`.
        folder: where everything is written.
        limits: when to stop.
        on_row: called with each row as it is recorded.
        checkpoint_seconds: at least this long between checkpoints; the last state is always saved.
    """

    def __init__(
        self,
        problem: Problem,
        model: nn.Module,
        optimizer: DataOptimizer,
        folder: RunFolder,
        limits: Limits,
        *,
        on_row: OnRow | None = None,
        checkpoint_seconds: float = 30.0,
    ) -> None:
        self.problem, self.model, self.optimizer = problem, model, optimizer
        self._ranks = Ranks(next(model.parameters()).device)
        self.folder, self.limits, self._on_row = folder, limits, on_row
        self._checkpoint_seconds = checkpoint_seconds
        self._rows: list[Row] = []
        self._best: dict[str, Any] = {}
        self._refused = 0
        self.interrupted = False
        # What is being done, for a person who waits.
        self.activity = "preparing"

    @property
    def iteration(self) -> int:
        """The last one that is recorded; -1 before the start is."""
        return int(self._rows[-1]["iteration"]) if self._rows else -1

    @property
    def phase(self) -> str:
        """What is being done; within a step, the phase that it is in where the method tells it."""
        if self.activity != STEP:
            return self.activity
        phase = self.optimizer.objective.ranks.current_phase
        return phase if phase in PHASES else STEP

    def resume(self) -> bool:
        """Take up model, optimiser and record as they were at the last checkpoint.

        Returns:
            False if the run was ended before its first checkpoint: it has all to do again.

        Raises:
            CheckpointError: the checkpoint is lost, damaged or of another network.
        """
        state = self._ranks.share(self._saved_state() if self._ranks.leads else None)
        if state is None:
            return False
        path = self.folder.checkpoint
        try:
            iteration = int(state["iteration"])
            self._best, self._refused = state["best"], state["refused"]
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (KeyError, RuntimeError, ValueError) as problem:
            raise CheckpointError(
                f"the checkpoint {path} is not one of this network and optimiser "
                f"({type(problem).__name__}): put the right one in its place, or start again in "
                "another folder"
            ) from problem
        self._rows = self._ranks.share(self.folder.rewind(iteration) if self._ranks.leads else None)
        return True

    def _saved_state(self) -> dict[str, Any] | None:
        """What the last checkpoint holds; None if the run was ended before its first one."""
        path = self.folder.checkpoint
        # The first checkpoint follows the first row at once.
        if not path.exists() and len(self.folder.rows()) <= 1:
            self.folder.rewind(-1)
            return None
        return load_checkpoint(path, torch.device("cpu"))  # other ranks have other devices

    def run(self) -> Ending:
        """Train until a limit; the model ends with the parameters of the last iteration."""
        try:
            return self._run()
        finally:
            self.folder.release()

    def _run(self) -> Ending:
        if not self._rows:
            self._record(None, 0.0)
            self.save()
        saved = time.monotonic()
        while (ending := self._ending()) is None:
            samples = self._samples()
            self.activity = STEP
            started, worked = time.perf_counter(), time.process_time()
            result = self.optimizer.step(samples)
            _wait_for_device(self.model)
            worked = time.process_time() - worked
            self._record(result, self._ranks.agreed_number(time.perf_counter() - started), worked)
            if time.monotonic() - saved > self._checkpoint_seconds:
                self.save()
                saved = time.monotonic()
        self.save()
        if self._ranks.leads:
            self.folder.finish(self._outcome(ending))
        return ending

    def _samples(self) -> Split | None:
        """What the next step is given; terms have points of their own."""
        iteration = self._rows[-1]["iteration"]
        return None if self.problem.terms else self.problem.samples(iteration)

    def save(self) -> None:
        """Write the checkpoint of the last recorded iteration."""
        if not self._ranks.leads:
            return
        self.activity = "saving"
        self.folder.sync()
        save_atomically(
            {
                "iteration": self._rows[-1]["iteration"],
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "best": self._best,
                "refused": self._refused,
            },
            self.folder.checkpoint,
        )

    def best_model(self) -> nn.Module:
        """The model with the parameters of the lowest validation error (else the last ones)."""
        if self._best:
            self.model.load_state_dict(self._best["model"])
        return self.model

    # Recording ------------------------------------------------------------------------------

    def _record(self, result: StepResult | None, seconds: float, worked: float = 0.0) -> None:
        self.activity = "measuring errors"
        last = self._rows[-1] if self._rows else START
        row: Row = {
            "iteration": self.iteration + 1,
            "seconds": last["seconds"] + seconds,
            # Rows of earlier versions do not have it.
            "cpu_seconds": last["cpu_seconds" if "cpu_seconds" in last else "seconds"] + worked,
            "passes": last["passes"] + (result.passes if result else 0.0),
            **self._errors(),
        }
        if result is not None:
            row |= account(result)
            self._refused = 0 if result.status.moved else self._refused + 1
        self._keep_best(row)
        self._rows.append(row)
        if self._ranks.leads:
            self.folder.append(row)
        if self._on_row is not None:
            self._on_row(row, result)

    def _errors(self) -> dict[str, float | None]:
        problem = self.problem
        return {
            "train": self._error(problem.train),
            "validation": None if problem.validation is None else self._error(problem.validation),
            "test": self._error(problem.test),
        }

    @torch.no_grad()
    def _error(self, split: Split) -> float:
        inputs, targets = split
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        for x, y in zip(inputs.split(METRIC_BATCH), targets.split(METRIC_BATCH), strict=True):
            total += self.problem.metric.per_sample(self.model(x), y).sum(dtype=torch.float64)
        own = torch.tensor([float(total), len(inputs)], dtype=torch.float64)
        with self._ranks.phase("metrics"):
            error, samples = self._ranks.sum_numbers(own).tolist()
        return self.problem.metric.of_mean(error / samples)

    def _keep_best(self, row: Row) -> None:
        error = row["validation"]
        if error is None or not math.isfinite(error):
            return
        if not self._best or error < self._best["validation"]:
            model = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
            self._best = {"validation": error, "iteration": row["iteration"], "model": model}

    # Deciding -------------------------------------------------------------------------------

    def _ending(self) -> Ending | None:
        last, limits = self._rows[-1], self.limits
        interrupted = torch.tensor([float(self.interrupted)], dtype=torch.float64)
        if float(self._ranks.sum_numbers(interrupted)):
            return Ending.INTERRUPTED
        error = last["validation"]
        if limits.target is not None and error is not None and error < limits.target:
            return Ending.SOLVED
        for limit, reached, ending in (
            (limits.iterations, last["iteration"], Ending.ITERATIONS),
            (limits.seconds, last["seconds"], Ending.SECONDS),
            (limits.passes, last["passes"], Ending.PASSES),
            (limits.refusals, self._refused, self._stuck()),
        ):
            if limit is not None and reached >= limit:
                return ending
        return Ending.EARLY_STOP if self._has_stopped_falling() else None

    def _stuck(self) -> Ending:
        is_diverged = self._rows[-1].get("status") == Status.NOT_FINITE.name.lower()
        return Ending.DIVERGED if is_diverged else Ending.STUCK

    def _has_stopped_falling(self) -> bool:
        limits, last = self.limits, self._rows[-1]
        if limits.early_stop is None or last["passes"] < limits.fewest_passes:
            return False
        errors = [(row["passes"], row["validation"]) for row in self._rows]
        if errors[-1][1] is None:
            return False
        past = (1 - limits.early_stop) * last["passes"]
        before = min(error for passes, error in errors if passes <= past)
        now = min(error for _, error in errors)
        return bool(now >= (1 - limits.tolerance) * before)

    def _note(self) -> str | None:
        """What to know of the run's times; a CPU that waits for a GPU may rest."""
        if next(self.model.parameters()).device.type != "cpu":
            return None
        return busy_machine(self._rows[-1]["seconds"], self._rows[-1]["cpu_seconds"])

    def _outcome(self, ending: Ending) -> dict[str, Any]:
        last = self._rows[-1]
        return {
            "ending": ending.name.lower(),
            "sentence": ending.value,
            **({"note": note} if (note := self._note()) else {}),
            "last": last,
            "best": next(
                (row for row in self._rows if row["iteration"] == self._best.get("iteration")),
                last,
            ),
        }


def _wait_for_device(model: nn.Module) -> None:
    device = next(model.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
