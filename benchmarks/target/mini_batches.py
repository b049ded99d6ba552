"""First-order training at its fastest: on a GPU a whole step is one CUDA graph."""

import math
import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.capture import captured
from benchmarks.rates import Precision, matmul_precision
from benchmarks.target.updates import Update
from krylov_descent.laboratory.problems.problem import PerSample, Split
from krylov_descent.optimizers.result import Status, StepResult

POINTS = 60  # of a learning curve


class MiniBatches:
    """Epochs of mini-batches behind `step(data)`, for the laboratory's training loop.

    One `step` is as many epochs as last a 60th of the budget, so that measuring errors stays
    cheap. The learning rate falls linearly to 0 over the budget's seconds and is set anew for each
    epoch. Recording counts as training time, as it does for KSD.

    Args:
        model: is trained in place.
        loss: (outputs, targets) to one number per sample.
        update: what is done with a gradient.
        batch_size: samples in a mini-batch; an epoch leaves out what is over.
        rate: at the start.
        seconds: the budget.
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
        seed: int,
        recorded: bool,
        precision: Precision = "float32",
    ) -> None:
        self.model, self.loss, self.update = model, loss, update
        self.batch_size, self.rate, self.seconds = batch_size, rate, seconds
        device = update.parameters[0].device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._recorded, self._precision = recorded, precision
        self._indices = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._last_loss = torch.zeros((), device=device)
        self._run: Any = None
        self._elapsed = 0.0

    def step(self, data: Split) -> StepResult:
        """Some epochs."""
        started = time.perf_counter()
        epochs, passed = 0, 0.0
        while not epochs or passed < self.seconds / POINTS:
            left = max(0.0, 1 - (self._elapsed + passed) / self.seconds)
            self.update.set_rate(left * self.rate)
            with matmul_precision(self._precision):
                self.epoch(data)
            loss = float(self._last_loss)  # waits for the device
            epochs += 1
            passed = time.perf_counter() - started
            if not math.isfinite(loss):
                break
        self._elapsed += passed
        status = Status.MOVED if math.isfinite(loss) else Status.NOT_FINITE
        return StepResult(
            loss=loss,
            loss_before=loss,
            loss_after=loss,
            status=status,
            reason=status.value,
            samples=len(data[0]),
            passes=float(epochs),
            seconds={"gradient": passed},
        )

    def epoch(self, data: Split, *, seconds: float = math.inf) -> None:
        """Every sample once, in a new order, at the rate that is set; or as many as time allows."""
        started = time.perf_counter()
        if self._run is None:
            self._run = self._record(data) if self._recorded else lambda: self._step(data)
        count, device = len(data[0]), self._indices.device
        order = torch.randperm(count, generator=self._generator, device=device)
        for indices in order[: count - count % self.batch_size].split(self.batch_size):
            self._indices.copy_(indices)
            self._run()
            if time.perf_counter() - started > seconds:
                break

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
