"""The objective over one set of samples, evaluated at many points: the set C of a step."""

import torch
from torch import Tensor

from krylov_descent.batches import Batch, InMemory, Samples
from krylov_descent.objective import Evaluation, Objective


class RepeatedObjective:
    """Values and gradients over the same samples again and again.

    On a GPU the work is recorded once and replayed (see `recordings`); elsewhere, for sets that
    do not fit one micro-batch or memory, it is the objective's own.

    Args:
        objective: f.
        samples: the set.
    """

    def __init__(self, objective: Objective, samples: Samples) -> None:
        self._objective, self.samples = objective, samples
        self._recorded, self._recorded_losses = None, None
        batch = self._single_batch()
        if batch is None:
            return
        self._batch = batch
        self._normaliser = float(objective.network.loss.normaliser(batch.targets, batch.size))
        if self._normaliser:  # else the objective says what is wrong
            self._recorded = objective.recordings.evaluation(batch)
            self._recorded_losses = objective.recordings.losses(batch)
        if self._recorded is not None:
            self._recorded.load(batch)

    def value_and_gradient(self) -> Evaluation:
        """f and its gradient at the parameters as they are."""
        if self._recorded is None:
            return self._objective.value_and_gradient(self.samples)
        total, decay, gradient = self._recorded()
        gradient.div_(self._normaliser)
        self._objective.parameters.add_decay(gradient)
        value = total / self._normaliser + decay
        return Evaluation(
            value, gradient, gradient.new_empty(0), self._batch.size, self._normaliser
        )

    def losses(self) -> Tensor:
        """nᵢ of every sample at the parameters as they are, [N] in float64 on the CPU."""
        if self._recorded_losses is None:
            return self._objective.losses(self.samples)
        return self._recorded_losses(self._batch).to("cpu", torch.float64)

    def _single_batch(self) -> Batch | None:
        """The samples as one batch on the device, where recording is possible and they fit."""
        objective = self._objective
        if not isinstance(self.samples, InMemory) or not objective.recordings.possible:
            return None
        batch = self.samples.batch.to(objective.parameters.device)
        return batch if 0 < batch.size <= objective.micro_batch else None
