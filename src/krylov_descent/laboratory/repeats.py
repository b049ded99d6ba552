"""One number from several runs of the same method, from other starts or on other splits."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t

CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and how far the truth may be from it.

    Attributes:
        mean: over the runs.
        half_width: of the 95% confidence interval around it; None for a single run.
        runs: how many there are.
    """

    mean: float
    half_width: float | None
    runs: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per run with Student's interval.

    The interval takes the runs as independent. Splits are not quite: their test sets do not
    overlap, but their training sets share most samples, so the interval is somewhat too narrow.
    """
    if not values:
        raise ValueError("`values` must hold at least one number")
    count, half_width = len(values), None
    if count > 1:
        error = statistics.stdev(values) / math.sqrt(count)
        half_width = float(t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return Estimate(mean=statistics.fmean(values), half_width=half_width, runs=count)
