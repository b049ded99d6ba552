"""The account of a step: numbers are collected during the step and become a `StepResult`."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.batches import Samples
from krylov_descent.objective.evaluation import Evaluation
from krylov_descent.objective.loss_scale import length
from krylov_descent.objective.objective import Objective
from krylov_descent.optimizers.gradient_noise import gradient_noise
from krylov_descent.optimizers.result import Status, StepResult

# Entries at the scale of the objective. The result has them without the scale.
SCALED = ("loss", "loss_before", "loss_after", "noise", "gradient_norm", "gradient_noise")

# The most changes of the scale in a step: the old scale may have to be reset to 1 before a fitting
# one can be found.
MOST_FITS = 2


class Stopwatch:
    """Wall-clock seconds by phase."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock, self._last = clock, clock()

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        now = self._clock()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


class Account:
    """Collects the numbers of a step under the names of `StepResult`.

    Args:
        objective: whose scale the losses, the noise and ‖g‖ have.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._watch = Stopwatch()
        self._numbers: dict[str, Any] = {"passes": 0.0}

    def note(self, **numbers: Any) -> None:
        """Store numbers by name; a later number replaces an earlier one."""
        self._numbers |= numbers

    def __getitem__(self, name: str) -> Any:
        """A stored number."""
        return self._numbers[name]

    def count(self, samples: int) -> None:
        """Add processed samples to the passes over the data. `samples` must have been noted."""
        self._numbers["passes"] += samples / self._numbers["samples"]

    def begin(self, evaluate: Callable[[], Evaluation]) -> tuple[Evaluation, float]:
        """Evaluate and note the objective and its gradient at the start of a step.

        The scale of the objective is fitted to them. Returns the evaluation and ‖g‖.

        Args:
            evaluate: value and gradient over all the data; called again after each change of scale.
        """
        found, norm = self._evaluated(evaluate)
        for _ in range(MOST_FITS):
            if not self._objective.fit_scale(found.value, norm):
                break
            found, norm = self._evaluated(evaluate)
        self.lap("gradient")
        return found, norm

    def _evaluated(self, evaluate: Callable[[], Evaluation]) -> tuple[Evaluation, float]:
        found = evaluate()
        norm = self._objective.ranks.agreed_number(length(found.gradient))
        self.note(loss=found.value, gradient_norm=norm)
        self.note(samples=found.samples, objective_samples=found.samples)
        self.count(found.samples)
        return found, norm

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to a phase."""
        self._watch.lap(phase)

    def moved(self, reason: str, loss_after: float) -> StepResult:
        """The result of a step that was taken."""
        return self._result(Status.MOVED, reason, loss_after)

    def refused(self, status: Status, reason: str | None = None) -> StepResult:
        """The result of a step that was not taken."""
        return self._result(status, reason or status.value, None)

    def no_decrease(
        self, why: str, samples: Samples, theta: Tensor, generator: torch.Generator
    ) -> StepResult:
        """The result of a step that found no decrease, with the noise of the gradient.

        Args:
            why: a sentence on why the search ended.
            samples: the set of the search, on which the gradient's noise is measured.
            theta: θ [n], the current parameters.
            generator: of the random signs in that measurement.
        """
        noise = gradient_noise(self._objective, samples, theta, generator)
        self.count(2 * self._numbers["objective_samples"])
        self.note(gradient_noise=noise)
        norm, scale = self._numbers["gradient_norm"], self._objective.scale
        told = f"the gradient's norm is {norm / scale:.2g}, its noise {noise / scale:.2g}"
        return self._result(Status.NO_DECREASE, f"no decrease: {why}; {told}", None)

    def _result(self, status: Status, reason: str, loss_after: float | None) -> StepResult:
        self._watch.lap("search")
        found = {"loss_before": self._numbers["loss"], **self._numbers}
        found["loss_after"] = found["loss_before"] if loss_after is None else loss_after
        found |= {name: found[name] / self._objective.scale for name in SCALED if name in found}
        return StepResult(status=status, reason=reason, seconds=self._watch.seconds, **found)
