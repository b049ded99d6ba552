"""First-order training at its fastest: on a GPU a whole step is one CUDA graph."""

import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.capture import captured
from benchmarks.rates import Precision, matmul_precision
from benchmarks.target.updates import Update
from krylov_descent.laboratory.problems.problem import PerSample, Split
from krylov_descent.optimizers.result import Status, StepResult

# A step lasts so much of the time that is over, but not less than so much of the budget.
GROWTH, SHORTEST = 0.02, 1 / 2000


class MiniBatches:
    """Mini-batches behind `step(data)`, for the laboratory's training loop.

    One `step` is as many mini-batches as last 2% of the time that is over, because errors are
    measured after it: no time to an error is longer by more than that, and measuring stays cheap.
    At the beginning it is a 2000th of the run, or one mini-batch if that is longer. The device is
    waited for once a step, and once an epoch. The learning rate is set anew as often. Recording
    counts as training time, as it does for KSD.

    Args:
        model: is trained in place.
        loss: (outputs, targets) to one number per sample.
        update: what is done with a gradient.
        batch_size: samples in a mini-batch; an epoch leaves out what is over.
        rate: at the start.
        seconds: the length of the run.
        decay: seconds over which the rate falls linearly to 0; None if it stays.
        seed: of the order of the samples.
        recorded: as CUDA graphs.
        precision: of matrix products on a GPU.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: PerSample,
        update: Update,
        *,
        batch_size: int,
        rate: float,
        seconds: float,
        decay: float | None,
        seed: int,
        recorded: bool,
        precision: Precision = "float32",
    ) -> None:
        self.model, self.loss, self.update = model, loss, update
        self.batch_size, self.rate = batch_size, rate
        self.seconds, self.decay = seconds, decay
        device = update.parameters[0].device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._recorded, self._precision = recorded, precision
        self._indices = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._last_loss = torch.zeros((), device=device)
        self._run: Any = None
        self._elapsed = 0.0
        self._order: Iterator[None] = iter(())  # what is left of an epoch
        self._left = 0
        self._batch_seconds = math.inf

    def step(self, data: Split) -> StepResult:
        """Some mini-batches."""
        started = time.perf_counter()
        self.update.for_training()
        wished = max(GROWTH * self._elapsed, SHORTEST * self.seconds)
        wished = min(wished, self.seconds - self._elapsed)
        done, passed, loss = 0, 0.0, math.nan
        # Of half a mini-batch too much and half of one too little, neither is better.
        while not done or passed + self._batch_seconds / 2 < wished:
            self.update.set_rate(self._rate_after(self._elapsed + passed))
            count = self._some(data, round((wished - passed) / self._batch_seconds))
            loss = float(self._last_loss)  # waits for the device
            before, passed = passed, time.perf_counter() - started
            self._batch_seconds = (passed - before) / count
            done += count
            if not math.isfinite(loss):
                break
        self.update.for_evaluation()
        passed = time.perf_counter() - started
        self._elapsed += passed
        status = Status.MOVED if math.isfinite(loss) else Status.NOT_FINITE
        return StepResult(
            loss=loss,
            loss_before=loss,
            loss_after=loss,
            status=status,
            reason=status.value,
            samples=len(data[0]),
            passes=done / (len(data[0]) // self.batch_size),
            seconds={"gradient": passed},
        )

    def epoch(self, data: Split, *, seconds: float = math.inf) -> None:
        """Every sample once, in a new order, at the rate that is set; or as many as time allows."""
        started = time.perf_counter()
        for _ in self._batches(data):
            if time.perf_counter() - started > seconds:
                break

    def _rate_after(self, seconds: float) -> float:
        left = 1.0 if self.decay is None else max(0.0, 1 - seconds / self.decay)
        return left * self.rate

    def _some(self, data: Split, count: int) -> int:
        """So many mini-batches, at least one and at most to the end of the epoch; how many."""
        if not self._left:
            self._order, self._left = self._batches(data), len(data[0]) // self.batch_size
        count = min(max(count, 1), self._left)
        with matmul_precision(self._precision):
            for _ in islice(self._order, count):
                pass
        self._left -= count
        return count

    def _batches(self, data: Split) -> Iterator[None]:
        """An epoch in a new order; each mini-batch is done when it is asked for."""
        if self._run is None:
            self._run = self._record(data) if self._recorded else lambda: self._step(data)
        count, device = len(data[0]), self._indices.device
        order = torch.randperm(count, generator=self._generator, device=device)
        for indices in order[: count - count % self.batch_size].split(self.batch_size):
            self._indices.copy_(indices)
            self._run()
            yield

    def state_dict(self) -> dict[str, Any]:
        """Nothing: these runs are not resumed."""
        return {}

    def _gradient(self, data: Split) -> None:
        inputs, targets = data
        x = inputs.index_select(0, self._indices)
        y = x if targets is inputs else targets.index_select(0, self._indices)
        loss = self.loss(self.model(x), y).mean()
        gradients = torch.autograd.grad(loss, self.update.parameters)
        for p, gradient in zip(self.update.parameters, gradients, strict=True):
            p.grad = gradient
        self._last_loss.copy_(loss.detach())

    def _step(self, data: Split) -> None:
        self._gradient(data)
        self.update.step()

    def _record(self, data: Split) -> Any:
        """The step as one graph, or the gradient where the update cannot be recorded.

        Recording runs what it records, so parameters and state are put back afterwards.
        """
        before: list[Tensor] = [p.detach().clone() for p in self.update.parameters]
        if not self.update.recordable:
            gradient = captured(lambda: self._gradient(data))

            def gradient_and_update() -> None:
                gradient()
                self.update.step()

            return gradient_and_update
        replay = captured(lambda: self._step(data))
        with torch.no_grad():
            for p, value in zip(self.update.parameters, before, strict=True):
                p.copy_(value)
        self.update.forget()
        return replay
