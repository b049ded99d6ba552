"""The means that become of sums over all samples, as a part of what is recorded with the sums.

In one process: ranks add up their sums first (see `evaluation`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from krylov_descent.cuda.graphs.capture import Part
from krylov_descent.cuda.graphs.parallel_branches import begin, join, side_by_side
from krylov_descent.cuda.graphs.staleness import PULSE_SAMPLES
from krylov_descent.cuda.triton.entry import under_way
from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.objective.parameters import FlatParameters


class MadeOfSquares(Protocol):
    """What is made of mean squared gradients by kernels alone, which a GPU records with them."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Where it is: the same at every step, updated in place."""

    def take_squares(self, parameters: FlatParameters, squares: Tensor) -> None:
        """Make it of squares [n], which may be overwritten."""


class Means(NamedTuple):
    """What `recorded_means` finds.

    Attributes:
        numbers: value and length of the gradient [2].
        vectors: gradient [n] and, perhaps, squares [n].
        losses: of the first samples, where they can tell whether recordings hold; else None.
        held: what was made of the squares; held by the recording, it stays in its place.
    """

    numbers: Tensor
    vectors: list[Tensor]
    losses: Tensor | None
    held: tuple[Tensor, ...]


def recorded_means(
    part: Part, into: MadeOfSquares | None, network: Network, batch: Batch, normaliser: Tensor
) -> Means:
    """The means of a part's sums over a batch, for a recording.

    Args:
        part: gives the losses, Σ gradients [n] and, perhaps, Σ squares [n].
        into: what is made of the squares, which are not given themselves then.
        network: whose parameters have the L2 term.
        batch: all samples.
        normaliser: what their losses are divided by, in float64.
    """
    parameters = network.parameters
    beside: list[Callable[[], Any]] = [
        parameters.decay_term,
        parameters.copy,
        # The sample's part of the mean is nᵢN/W, so its square is nᵢ²N²/W², over N.
        lambda: [s.to(parameters.dtype) for s in (1 / normaliser, batch.size / normaliser**2)],
    ]
    decay, theta, (scale, scale_of_squares) = begin(beside)
    losses, gradient, *of_squares = part(network, batch)
    join()

    def numbers() -> Tensor:
        parameters.scale_and_add_decay(gradient, scale, theta)
        value = losses.sum(dtype=torch.float64) / normaliser + decay
        return torch.stack([value, gradient.norm().double()])

    def scaled(sums: Tensor) -> Tensor:
        sums.mul_(scale_of_squares)
        if into is not None:
            into.take_squares(parameters, sums)
        return sums

    following: list[Callable[[], Tensor]] = [
        numbers,
        *(partial(scaled, sums) for sums in of_squares),
    ]
    found, *squares = side_by_side(following)
    # Where a few samples by themselves would be the same bits, rounding in a larger batch might
    # refute recordings close to a minimum; and in few digits anywhere.
    alone = under_way() is not None and network.is_plain and network.autocast is None
    first = losses[:PULSE_SAMPLES] if alone else None
    if into is None:
        return Means(found, [gradient, *squares], first, ())
    return Means(found, [gradient], first, into.tensors)
