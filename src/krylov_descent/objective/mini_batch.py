"""The gradient of one mini-batch, for optimisers that update once per mini-batch."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network, require_graph
from krylov_descent.objective.objective import Objective


class MiniBatchGradient(NamedTuple):
    """Loss and gradient of one mini-batch.

    Attributes:
        loss_sum: Σ nᵢ, a float64 scalar.
        normaliser: Σ wᵢ, a float64 scalar.
        gradients: of Σ nᵢ / Σ wᵢ, one per parameter; None if the loss does not depend on it.
    """

    loss_sum: Tensor
    normaliser: Tensor
    gradients: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """Work for an engine: the gradient of the mean loss of a mini-batch.

    Attributes:
        objective: f.
        batch: the samples, on the device of the parameters.
        usual: whether most mini-batches have this size, so that an engine may optimise for it.
    """

    objective: Objective
    batch: Batch
    usual: bool

    def run(self) -> MiniBatchGradient:
        """Accumulate the gradient over micro-batches."""
        objective = self.objective
        return mini_batch_gradient(objective.network, self.batch, objective.micro_batch)


def mini_batch_gradient(
    network: Network, batch: Batch, micro_batch: int | None = None
) -> MiniBatchGradient:
    """The gradient of the mean loss of a batch. The host reads nothing from the device.

    Args:
        network: model and loss.
        batch: the samples.
        micro_batch: the most samples per forward pass; by default all samples.

    Raises:
        ValueError: the loss does not depend on any trainable parameter.
    """
    tensors = network.parameters.tensors
    normaliser = network.loss.normaliser(batch.targets, batch.size)
    gradients: list[Tensor | None] = [None] * len(tensors)
    total = torch.zeros((), dtype=torch.float64, device=network.parameters.device)
    for piece in batch.split(micro_batch or batch.size):
        found = network.sample_losses(piece)
        require_graph(found)
        network.check_leaves([found])
        weights = torch.ones_like(found) / normaliser
        part = torch.autograd.grad(found, tensors, weights, allow_unused=True)
        gradients = [_sum(a, b) for a, b in zip(gradients, part, strict=True)]
        total += found.detach().sum(dtype=torch.float64)
    return MiniBatchGradient(total, torch.as_tensor(normaliser, dtype=torch.float64), gradients)


def _sum(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)
