"""What one walk over a set of samples adds up, and the means that become of it.

The sums are of one rank until they are read: then, and only then, they are put together.
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
    """What one walk over a set of samples found.

    Args:
        value: the objective, L2 included; with `norm` in one future where both are on their way.
        gradient: its gradient [n]; empty where it was not asked for.
        squares: mean of the squared per-sample gradients of the loss [n], L2 left out; empty
            where not asked for.
        samples: how many samples were seen.
        normaliser: what the sum of their losses was divided by; the same number for most losses.

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
        """The objective; waited for if it is on its way."""
        return self._value.result()[0] if isinstance(self._value, Launched) else self._value

    @property
    def norm(self) -> float:
        """The length of the gradient in its own precision; waited for, if it is on its way."""
        if isinstance(self._value, Launched):
            return self._value.result()[1]
        return float(self.gradient.norm())

    def without_squares(self) -> "Evaluation":
        """The same without the squares, whose memory is let go."""
        nothing = self.squares.new_empty(0)
        return Evaluation(self._value, self.gradient, nothing, self.samples, self.normaliser)


def check_normaliser(normaliser: float) -> None:
    """Refuse a mean over nothing."""
    if normaliser == 0:
        raise ValueError("every target is ignored or has weight zero: the mean loss is not defined")


@dataclass(frozen=True, slots=True)
class Whole:
    """A set of samples on all ranks together.

    Attributes:
        samples: how many there are.
        normaliser: what the sum of their losses is divided by.
    """

    samples: int
    normaliser: float


class Sums:
    """Σ nᵢ and Σ wᵢ in float64 on the device, read by the host once at the end.

    Of this rank until they are read, and then of all ranks.

    Args:
        loss: that gives w.
        parameters: of the L2 term.
        ranks: to sum over.
    """

    def __init__(self, loss: SampleLoss, parameters: FlatParameters, ranks: Ranks) -> None:
        self._loss, self._parameters, self._ranks = loss, parameters, ranks
        self._numerators: list[Tensor] = []
        self._normalisers: list[float | Tensor] = []
        self._samples = 0

    def add(self, batch: Batch, losses: Tensor) -> None:
        """Take up the losses [m] of a batch."""
        self._numerators.append(losses.detach().sum(dtype=torch.float64))
        self._normalisers.append(self._loss.normaliser(batch.targets, batch.size))
        self._samples += batch.size

    def value(self) -> float:
        """The objective."""
        return self._read()[0]

    def evaluation(
        self,
        gradient: Tensor | None,
        squares: Tensor | None,
        *,
        squared: bool = False,
    ) -> Evaluation:
        """Divide the sums by what they are means over, in place, and add the L2 term.

        Args:
            gradient: sum over this rank's samples; None where it has none.
            squares: likewise.
            squared: whether squares are wanted.
        """
        value, normaliser = self._read()
        parameters, ranks = self._parameters, self._ranks
        gradient = ranks.sum_vector(self._or_zeros(gradient)).div_(normaliser)
        parameters.add_decay(gradient)
        if squared:
            # The sample's part of the mean is nᵢN/W, so its square is nᵢ²N²/W², over N.
            squares = ranks.sum_vector(self._or_zeros(squares))
            squares.mul_(self._samples / normaliser**2)
        else:
            squares = gradient.new_empty(0)
        return Evaluation(value, gradient, squares, self._samples, normaliser)

    def part(self, total: Tensor | None, normaliser: float) -> Evaluation:
        """The same of this rank's samples alone, divided by what all ranks' are divided by."""
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
        # Where a GPU failed on the way, this is where the host learns of it.
        with self._ranks.own_work():
            numerator = float(torch.stack(self._numerators).sum()) if self._numerators else 0.0
            normaliser = float(sum(float(w) for w in self._normalisers))
        return numerator, normaliser

    def _read(self) -> tuple[float, float]:
        numerator, normaliser = self._own_numbers()
        decay = 0.0
        with self._ranks.own_work():
            # Rank 0's: another rank may have another last bit, and decide otherwise.
            decay = self._parameters.decay_value() if self._ranks.leads else 0.0
        own = torch.tensor([numerator, normaliser, self._samples, decay], dtype=torch.float64)
        numerator, normaliser, samples, decay = self._ranks.sum_numbers(own).tolist()
        self._samples = int(samples)
        if not self._samples:
            raise ValueError("`data` is empty: it must hold at least one sample")
        check_normaliser(normaliser)
        return numerator / normaliser + decay, normaliser
