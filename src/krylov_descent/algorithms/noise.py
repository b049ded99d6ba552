"""The noise of a sum over samples, measured rather than assumed.

A loss in float32, tf32 or bf16 is a smooth function plus rounding. On a short line the smooth part
is a parabola, which third differences make vanish; the rounding stays, because from point to point
it behaves like a random number (Hamming's difference table; Moré & Wild, *Estimating computational
noise*, 2011).
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from krylov_descent.runtime.ranks import Ranks
from krylov_descent.runtime.threads import one_thread

ORDER = 3  # of the differences
NOISE_POINTS = 4
# CLOSER: the factor between the distances of two measurements. FALL: an estimate that is not
# rounding falls at least by this factor. STAYS: one that did not fall so often in a row is
# rounding; once is not enough, because a kink close to a point can hide the fall.
CLOSER, FALL, STAYS, MOST_MEASUREMENTS = 16.0, 4.0, 2, 6


def noise_steps(epsilon: float) -> list[float]:
    """Parts of a step of an optimiser, back from the start of a search, for measuring noise.

    What is left of the values there after third differences is noise, if the points are so close
    that the objective itself is a quadratic. Over a full step its cubic part is at most about as
    large as the objective; a fraction of a tenth of ε^⅓ makes that a thousandth of the rounding.
    """
    spacing = 0.1 * epsilon ** (1 / 3)
    return [-k * spacing for k in range(NOISE_POINTS)]


def settled_noise(measure: Callable[[float], float], limit: float) -> float:
    """The noise, measured where the function is a parabola to within its noise.

    Along a direction that is too long, or across a kink, third differences show the function
    itself. That part falls with the distance of the points (to 1/4096 or 1/16 of itself, if they
    are 16 times as close), and rounding does not: an estimate that is too large to be believed is
    measured again closer in, until it is believable or stays.

    Args:
        measure: from a factor (1 or less) to the noise that is estimated from points at that many
            times the distance of `noise_steps`; not finite where a value is not.
        limit: the most that is believed without a second measurement, √ε of the value or so.

    Returns:
        The noise; infinity, which says nothing, if it neither falls below the limit nor stays.
    """
    distance, stayed = 1.0, 0
    noise = measure(distance)
    for _ in range(MOST_MEASUREMENTS - 1):
        if noise <= limit:
            return noise
        distance /= CLOSER
        closer = measure(distance)
        if closer == 0:  # the points are one and the same
            break
        stayed = stayed + 1 if closer > noise / FALL else 0
        noise = closer
        if stayed == STAYS:
            return noise
    return noise if noise <= limit else math.inf


def noise_of_sum(values: Tensor) -> float:
    """Estimate the standard deviation of the error of the sum over samples.

    Two estimates are made, and the larger one is returned:

    * from each sample's own differences, as if samples erred independently. It averages over
      N samples, so it is precise, but blind to what they share;
    * from the differences of the sums. It also sees errors that samples share, such as the
      rounding of the parameters, but with p − 3 degrees of freedom it is easily wrong by a factor
      of two; with four points it is the size of one random number.

    So the first is a floor under the second, which alone would often report next to no noise.
    Shared errors may still be underrated when the second happens to be small. In return, where
    there are none, the larger of the two is somewhat too high (four points: by 22 % in the root
    mean square), which costs the user of the noise less than too low would.

    Args:
        values: [p, N] float64, p ≥ 4: the values of N samples at p equally spaced points of a
            line. The points must be so close that the smooth part is a parabola to within the
            noise, and so far apart that each is rounded anew. More points sharpen the estimate.

    Returns exactly 0.0 where the third differences vanish. Cost: O(p²N) operations.
    """
    if values.dim() != 2 or values.shape[0] <= ORDER or values.dtype != torch.float64:
        raise ValueError(
            f"values must be a float64 tensor of shape [points, samples] with at least {ORDER + 1} "
            f"points, got shape {tuple(values.shape)}, {values.dtype}"
        )
    if not values.isfinite().all():
        raise ValueError(
            "values must be finite; measure the noise closer to a point where the function is"
        )
    return noise_from(error_sums(values))


def noise_over_ranks(rows: Sequence[Tensor], points: int, ranks: Ranks) -> float:
    """The same of samples that are spread over ranks; NaN if any value is not finite.

    Args:
        rows: the values of this rank's samples [N] at each of the points; fewer if it failed.
        points: p.
        ranks: p − 2 numbers are summed over them.
    """
    own = torch.zeros(points - ORDER + 1, dtype=torch.float64)
    with ranks.own_work():
        values = torch.stack(list(rows))
        if not bool(values.isfinite().all()):
            own.fill_(math.nan)
        elif len(rows) == points:
            own = error_sums(values)
    return noise_from(ranks.sum_numbers(own))


@one_thread()
def error_sums(values: Tensor) -> Tensor:
    """Σ error², and Σ error at each of the p − 3 whitened differences, over the samples.

    [p − 2], from values [p, N] as `noise_of_sum` has them, where these are; not finite where a
    value is not. Sums over parts of the samples add up.
    """
    # Differences of neighbouring float64 numbers are exact, so this adds no rounding of its own.
    differences = list(values.diff(n=ORDER, dim=0))
    # Row by row, with numbers of the host: a matrix would be copied, which cannot be recorded.
    rows = [list(map(operator.mul, differences, row)) for row in _whitening(len(values))]
    errors = torch.stack([sum(others, start=first) for first, *others in rows])  # [p − 3, N]
    return torch.cat([errors.norm().square().reshape(1), errors.sum(dim=1)])


def noise_from(sums: Tensor) -> float:
    """What `noise_of_sum` gives, from `error_sums` over all samples."""
    squares, *shared_too = sums.tolist()
    return max(math.sqrt(squares), math.hypot(*shared_too)) / math.sqrt(len(shared_too))


@functools.cache
def _whitening(points: int) -> list[list[float]]:
    """Makes overlapping differences uncorrelated, each with the variance of one value.

    [p − 3, p − 3]. For four points it divides by √20, where 20 = 1² + 3² + 3² + 1².
    """
    difference = np.diff(np.eye(points), n=ORDER, axis=0)  # [p − 3, p]
    rows: list[list[float]] = np.linalg.inv(np.linalg.cholesky(difference @ difference.T)).tolist()
    return rows
