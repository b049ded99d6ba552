"""What a problem of the road test is."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent.laboratory.problems.problem import PerSample

# Samples of a forward pass that measures the loss.
CHUNK = 5000


class Task(NamedTuple):
    """A model at its start, and what it learns.

    Attributes:
        model: maps inputs to outputs; that of a physics-informed net to residuals.
        loss: one of torch's, a mean over samples.
        inputs: [N, …].
        targets: [N, …].
        each: the loss of each sample [n], given outputs and targets; None for the mean of `loss`
            over a sample's elements.
    """

    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    targets: Tensor
    each: PerSample | None = None

    def to(self, device: torch.device) -> "Task":
        """The task on a device."""
        inputs = self.inputs.to(device)
        same = self.targets is self.inputs  # an autoencoder's
        targets = inputs if same else self.targets.to(device)
        return self._replace(model=self.model.to(device), inputs=inputs, targets=targets)

    def sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of each sample [n], whose mean is trained."""
        if self.each is not None:
            return self.each(outputs, targets)
        each: Tensor
        if isinstance(self.loss, nn.MSELoss):
            each = F.mse_loss(outputs, targets, reduction="none")
        elif isinstance(self.loss, nn.BCEWithLogitsLoss):
            each = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        else:
            each = F.cross_entropy(outputs, targets, reduction="none")
        return each if each.dim() == 1 else each.flatten(1).mean(1)

    def value(self) -> float:
        """The loss over all samples."""
        total, size = 0.0, len(self.inputs)
        for start in range(0, size, CHUNK):
            x, y = self.inputs[start : start + CHUNK], self.targets[start : start + CHUNK]
            # Grad mode stays on for forward passes that differentiate.
            total += float(self.sample_losses(self.model(x), y).detach().double().sum())
        return total / size


@dataclass(frozen=True)
class Course:
    """How long a run on a kind of device may take, and what it should reach.

    Attributes:
        seconds: of training; learning rates fall to 0 over them.
        modest: a loss to reach.
        demanding: another.
    """

    seconds: float
    modest: float
    demanding: float


@dataclass(frozen=True)
class RoadProblem:
    """A problem of the road test.

    Attributes:
        title: what tables call it.
        make: the task on a kind of device ("cpu" or "cuda"), given the seed of its start.
        batch_size: of first-order methods; None for all samples, as is usual where they are few.
    """

    title: str
    make: Callable[[str, int], Task]
    batch_size: int | None = None
