"""Sums over one pass through a set of samples, and the means computed from these sums.

Each rank accumulates sums over its own samples. An all-reduce adds them up when they are read.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch
from krylov_descent.objective.losses import SampleLoss
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.runtime.engine import Launched
from krylov_descent.runtime.ranks import Ranks


class Evaluation:
    """The objective over a set of samples, with its gradient and mean squared gradients.

    Args:
        value: the objective, L2 included; or a future of the pair (objective, gradient norm).
        gradient: the gradient of the objective [n].
        squares: mean of the squared per-sample gradients of the loss [n], without L2; empty if not
            requested.
        samples: the number of samples.
        normaliser: Σ wᵢ, by which the sum of the losses was divided; for most losses it equals
            `samples`.

    Attributes:
        gradient, squares, samples, normaliser: as given.
    """

    def __init__(
        self,
        value: float | Launched[tuple[float, float]],
        gradient: Tensor,
        squares: Tensor,
        samples: int,
        normaliser: float,
    ) -> None:
        self.gradient, self.squares = gradient, squares
        self.samples, self.normaliser = samples, normaliser
        self._value = value

    @property
    def value(self) -> float:
        """The objective. Waits for the future if there is one."""
        return self._value.result()[0] if isinstance(self._value, Launched) else self._value

    @property
    def norm(self) -> float:
        """‖gradient‖, computed in the gradient's dtype. Waits for the future if there is one."""
        if isinstance(self._value, Launched):
            return self._value.result()[1]
        return float(self.gradient.norm())

    def without_squares(self) -> "Evaluation":
        """This evaluation with empty `squares`, so that their memory can be freed."""
        nothing = self.squares.new_empty(0)
        return Evaluation(self._value, self.gradient, nothing, self.samples, self.normaliser)


def check_normaliser(normaliser: float) -> None:
    """Raise ValueError if Σ wᵢ is zero, because the mean loss is then undefined."""
    if normaliser == 0:
        raise ValueError("every target is ignored or has weight zero: the mean loss is not defined")


@dataclass(frozen=True, slots=True)
class Whole:
    """The size of a set of samples over all ranks.

    Attributes:
        samples: the number of samples.
        normaliser: Σ wᵢ, by which the sum of their losses is divided.
    """

    samples: int
    normaliser: float


class Sums:
    """Running sums Σ nᵢ and Σ wᵢ of one pass over samples, in float64 on the device.

    The host reads the sums once, at the end of the pass. Reading them sums over all ranks.

    Args:
        loss: computes wᵢ.
        parameters: for the L2 term.
        ranks: the ranks to sum over.
    """

    def __init__(self, loss: SampleLoss, parameters: FlatParameters, ranks: Ranks) -> None:
        self._loss, self._parameters, self._ranks = loss, parameters, ranks
        self._numerators: list[Tensor] = []
        self._normalisers: list[float | Tensor] = []
        self._samples = 0

    def add(self, batch: Batch, losses: Tensor) -> None:
        """Add the losses [m] of a batch."""
        self._numerators.append(losses.detach().sum(dtype=torch.float64))
        self._normalisers.append(self._loss.normaliser(batch.targets, batch.size))
        self._samples += batch.size

    def value(self) -> float:
        """The objective over the samples of all ranks; one all-reduce of four numbers.

        Raises:
            ValueError: there are no samples, or Σ wᵢ is zero.
        """
        return self._read()[0]

    def evaluation(
        self,
        gradient: Tensor | None,
        squares: Tensor | None,
        *,
        squared: bool = False,
    ) -> Evaluation:
        """Means over the samples of all ranks, computed in place of the sums, plus the L2 term.

        Args:
            gradient: Σ of gradients over this rank's samples [n]; None if it has no samples.
            squares: Σ of squared gradients over this rank's samples [n]; None if it has no samples.
            squared: whether to return the mean of the squares.

        Raises:
            ValueError: there are no samples, or Σ wᵢ is zero.
        """
        value, normaliser = self._read()
        parameters, ranks = self._parameters, self._ranks
        gradient = ranks.sum_vector(self._or_zeros(gradient)).div_(normaliser)
        parameters.add_decay(gradient)
        if squared:
            # With W = Σ wᵢ, f is the mean of nᵢN/W. The mean of squares is Σ (∇nᵢ N/W)² / N.
            squares = ranks.sum_vector(self._or_zeros(squares))
            squares.mul_(self._samples / normaliser**2)
        else:
            squares = gradient.new_empty(0)
        return Evaluation(value, gradient, squares, self._samples, normaliser)

    def part(self, total: Tensor | None, normaliser: float) -> Evaluation:
        """This rank's summand of objective and gradient; no communication.

        The sum of these evaluations over ranks is the evaluation over all samples. Rank 0 adds the
        L2 term. Value and gradient are NaN if this rank has failed.

        Args:
            total: Σ of gradients over this rank's samples [n], overwritten; None if there are none.
            normaliser: Σ wᵢ over the samples of all ranks.
        """
        parameters, ranks = self._parameters, self._ranks
        gradient = self._or_zeros(total).div_(normaliser)
        value = self._own_numbers()[0] / normaliser
        if ranks.leads:
            value += parameters.decay_value()
            parameters.add_decay(gradient)
        if ranks.failed:
            value = math.nan
            gradient.fill_(value)
        return Evaluation(value, gradient, gradient.new_empty(0), self._samples, normaliser)

    def _or_zeros(self, vector: Tensor | None) -> Tensor:
        parameters = self._parameters
        if vector is not None:
            return vector
        return torch.zeros(parameters.numel, dtype=parameters.dtype, device=parameters.device)

    def _own_numbers(self) -> tuple[float, float]:
        numerator = normaliser = 0.0
        # These reads synchronise with the device, so errors of earlier GPU work are raised here.
        with self._ranks.own_work():
            numerator = float(torch.stack(self._numerators).sum()) if self._numerators else 0.0
            normaliser = float(sum(float(w) for w in self._normalisers))
        return numerator, normaliser

    def _read(self) -> tuple[float, float]:
        numerator, normaliser = self._own_numbers()
        decay = 0.0
        with self._ranks.own_work():
            # Only rank 0 adds the L2 term: the sum counts it once, and all ranks get the same bits.
            decay = self._parameters.decay_value() if self._ranks.leads else 0.0
        own = torch.tensor([numerator, normaliser, self._samples, decay], dtype=torch.float64)
        numerator, normaliser, samples, decay = self._ranks.sum_numbers(own).tolist()
        self._samples = int(samples)
        if not self._samples:
            raise ValueError("`data` is empty: it must hold at least one sample")
        check_normaliser(normaliser)
        return numerator / normaliser + decay, normaliser
