"""The gradient of one mini-batch, for optimisers that make an update for each."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network, require_graph
from krylov_descent.objective.objective import Objective


class MiniBatchGradient(NamedTuple):
    """Of one mini-batch: Σ nᵢ and Σ wᵢ in float64, and the gradient of the mean loss.

    A gradient is None where the loss does not depend on the parameter.
    """

    loss_sum: Tensor
    normaliser: Tensor
    gradients: list[Tensor | None]


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The work of finding the gradient of a mini-batch.

    Attributes:
        objective: f.
        batch: the samples, on the device of the parameters.
        usual: whether most mini-batches are of this size.
    """

    objective: Objective
    batch: Batch
    usual: bool

    def run(self) -> MiniBatchGradient:
        """Micro-batch by micro-batch."""
        objective = self.objective
        return mini_batch_gradient(objective.network, self.batch, objective.micro_batch)


def mini_batch_gradient(
    network: Network, batch: Batch, micro_batch: int | None = None
) -> MiniBatchGradient:
    """The gradient of the mean loss of a batch; nothing is read from its device.

    Args:
        network: model and loss.
        batch: the samples.
        micro_batch: the most samples handled at a time; all of them by default.
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
