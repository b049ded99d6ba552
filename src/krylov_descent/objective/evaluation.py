"""What one walk over a set of samples adds up, and the means that become of it.

The sums are of one rank until they are read: then, and only then, they are put together.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.host_transfer import OnTheWay
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.losses import SampleLoss
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.runtime.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one walk over a set of samples found.

    Attributes:
        value: the objective, L2 included.
        gradient: its gradient [n]; empty where it was not asked for.
        squares: mean of the squared per-sample gradients of the loss [n], L2 left out; empty
            where not asked for.
        samples: how many samples were seen.
        normaliser: what the sum of their losses was divided by; the same number for most losses.
        norm: length of the gradient, where it came with the value; else NaN.
        later: value and norm, where they are on their way to the host; NaN until they are `there`.
    """

    value: float
    gradient: Tensor
    squares: Tensor
    samples: int
    normaliser: float
    norm: float = math.nan
    later: OnTheWay | None = None

    def there(self) -> "Evaluation":
        """The same with its value and norm, which are waited for."""
        if self.later is None:
            return self
        value, norm = self.later.read()
        return replace(self, value=value, norm=norm, later=None)


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
        later: bool = False,
    ) -> Evaluation:
        """Divide the sums by what they are means over, in place, and add the L2 term.

        Args:
            gradient: sum over this rank's samples; None where it has none.
            squares: likewise.
            squared: whether squares are wanted.
            later: not to wait for the value, where that is possible.
        """
        known = self._known_normaliser() if later else None
        value, normaliser = self._read() if known is None else (math.nan, known)
        parameters, ranks = self._parameters, self._ranks
        gradient = ranks.sum_vector(self._or_zeros(gradient)).div_(normaliser)
        parameters.add_decay(gradient)
        if squared:
            # The sample's part of the mean is nᵢN/W, so its square is nᵢ²N²/W², over N.
            squares = ranks.sum_vector(self._or_zeros(squares))
            squares.mul_(self._samples / normaliser**2)
        else:
            squares = gradient.new_empty(0)
        found = Evaluation(value, gradient, squares, self._samples, normaliser)
        return found if known is None else replace(found, later=self._send(known, gradient))

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

    def _known_normaliser(self) -> float | None:
        """What to divide by; None where a rank has to be asked, or a GPU, or where it is zero."""
        if self._ranks.together or any(isinstance(w, Tensor) for w in self._normalisers):
            return None
        return float(sum(self._normalisers)) or None

    def _send(self, normaliser: float, gradient: Tensor) -> OnTheWay:
        """The objective, which `_read` would wait for, and the length of its gradient [n]."""
        numerator = torch.stack(self._numerators).sum()
        # By a tensor: a number's inverse would be multiplied with, which rounds twice.
        mean = numerator / torch.full_like(numerator, normaliser)
        value = mean + self._parameters.decay_term()
        return OnTheWay(torch.stack([value, gradient.norm().double()]))

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
