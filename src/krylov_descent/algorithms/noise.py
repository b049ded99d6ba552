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
# CLOSER: the ratio between the distances of two measurements. FALL: an estimate that is not
# rounding falls at least by this factor. STAYS: an estimate is rounding if it did not fall this
# many times in a row; once is not enough, because a kink close to a point can hide the fall.
CLOSER, FALL, STAYS, MOST_MEASUREMENTS = 16.0, 4.0, 2, 6
# The change of the value over the points, beyond the value itself, is at most so many times noise.
SPREAD = 10.0


def noise_steps(epsilon: float) -> list[float]:
    """Points at which to measure noise, as fractions of an optimiser's step back from the start.

    Third differences of the values at these points are noise if the points are so close that the
    objective is a quadratic there. Over a full step the cubic part of the objective is at most
    about as large as the objective. A spacing of a tenth of ε^⅓ makes it a thousandth of the
    rounding.
    """
    spacing = 0.1 * epsilon ** (1 / 3)
    return [-k * spacing for k in range(NOISE_POINTS)]


def settled_noise(measure: Callable[[float], float], limit: float) -> float:
    """The noise, measured where the function is a parabola to within its noise.

    Along a direction that is too long, or across a kink, third differences show the function
    itself. This part falls with the distance of the points (to 1/4096 or 1/16 of itself, if they
    are 16 times as close), and rounding does not. An estimate above the limit is measured again
    with closer points, until it is below the limit or stops falling.

    Args:
        measure: a factor (1 or less) → the noise estimated from points at that multiple of the
            distances of `noise_steps`; not finite if a value is not finite.
        limit: the largest estimate to accept without a second measurement, about √ε of the value.

    Returns:
        The noise; infinity, which means unknown, if it neither falls below the limit nor stays.
    """
    distance, stayed = 1.0, 0
    noise = measure(distance)
    for _ in range(MOST_MEASUREMENTS - 1):
        if noise <= limit:
            return noise
        distance /= CLOSER
        closer = measure(distance)
        if closer == 0:  # the points coincide
            break
        stayed = stayed + 1 if closer > noise / FALL else 0
        noise = closer
        if stayed == STAYS:
            return noise
    return noise if noise <= limit else math.inf


def noise_of_sum(values: Tensor) -> float:
    """Estimate the standard deviation of the error of the sum over samples.

    Two estimates are made, and the larger one is returned:

    * from each sample's own differences, as if the errors of samples were independent. It averages
      over N samples, so it is precise, but it misses errors that samples share;
    * from the differences of the sums. It also sees errors that samples share, such as the rounding
      of the parameters. With p − 3 degrees of freedom it is easily wrong by a factor of two; with
      four points it is the size of one random number.

    The first estimate is a floor under the second, which alone would often report next to no noise.
    Shared errors may still be underrated when the second happens to be small. Without shared errors
    the larger of the two is somewhat too high (four points: by 22 % in the root mean square). Too
    high an estimate costs less than one that is too low.

    Args:
        values: [p, N] float64, p ≥ 4: the values of N samples at p equally spaced points of a line.
            The points must be so close that the smooth part is a parabola to within the noise, and
            so far apart that each is rounded anew. More points sharpen the estimate.

    Returns exactly 0.0 if the third differences vanish. Cost: O(p²N) operations.

    Raises:
        ValueError: the values have a wrong shape or dtype, or are not finite.
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
    """The estimate of `noise_of_sum` for samples spread over ranks; NaN if it says nothing.

    It says nothing if a value is not finite, or if the points are so far apart that the sum at the
    last one is of another size than at the first: the rounding of larger numbers is not that of the
    first.

    Args:
        rows: the values of this rank's samples [N] at each of the points; fewer if the rank failed.
        points: p.
        ranks: the ranks, over which p numbers are summed.
    """
    own = torch.zeros(points, dtype=torch.float64)
    with ranks.own_work():
        values = torch.stack(list(rows))
        if not bool(values.isfinite().all()):
            own.fill_(math.nan)
        elif len(rows) == points:
            sums = torch.stack([values[0].sum(), (values[-1] - values[0]).sum()])
            own = torch.cat([sums, error_sums(values)])
    value, change, *errors = ranks.sum_numbers(own).tolist()
    noise = _noise_from(errors)
    return noise if abs(change) <= abs(value) + SPREAD * noise else math.nan


@one_thread()
def error_sums(values: Tensor) -> Tensor:
    """Σ error², and Σ error for each of the p − 3 whitened differences, over the samples.

    Args:
        values: [p, N], as in `noise_of_sum`.

    Returns:
        [p − 2], on the device of the values; not finite if a value is not. The results for parts of
        the samples add up.
    """
    # Differences of neighbouring float64 numbers are exact, so this adds no rounding of its own.
    differences = list(values.diff(n=ORDER, dim=0))
    # Row by row, with numbers of the host: a matrix would be copied to the device, which a CUDA
    # graph cannot record.
    rows = [list(map(operator.mul, differences, row)) for row in _whitening(len(values))]
    errors = torch.stack([sum(others, start=first) for first, *others in rows])  # [p − 3, N]
    return torch.cat([errors.norm().square().reshape(1), errors.sum(dim=1)])


def noise_from(sums: Tensor) -> float:
    """The estimate of `noise_of_sum`, from `error_sums` over all samples."""
    return _noise_from(sums.tolist())


def _noise_from(sums: list[float]) -> float:
    squares, *shared_too = sums
    return max(math.sqrt(squares), math.hypot(*shared_too)) / math.sqrt(len(shared_too))


@functools.cache
def _whitening(points: int) -> list[list[float]]:
    """The matrix [p − 3, p − 3] that makes overlapping differences uncorrelated.

    Each then has the variance of one value. For four points the matrix divides by √20,
    where 20 = 1² + 3² + 3² + 1².
    """
    difference = np.diff(np.eye(points), n=ORDER, axis=0)  # [p − 3, p]
    rows: list[list[float]] = np.linalg.inv(np.linalg.cholesky(difference @ difference.T)).tolist()
    return rows
