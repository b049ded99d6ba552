"""Sets B and C that grow, `subset_size="auto"`.

A step is the best point of its subspace on C, so it is worth less on all the data. How much less
is known without any further work: the next step finds the loss on A. Small sets are cheap, and
early in training what they say of a step holds for all the data; when less than half of it does,
they are doubled. (Byrd, Chin, Nocedal and Wu 2012 grow sets by the variance of gradients.)

The memory of that is three numbers in a parameter group, where checkpoints have them. Losses on
other data than those of the step before say nothing of it, and are not compared.
"""

import math
import weakref
from collections.abc import Mapping
from typing import Any

from krylov_descent.optimizers.result import Status, StepResult
from krylov_descent.parameters import FlatParameters
from krylov_descent.subsets import FEWEST, SMALLEST

# Of what the last steps promised on C, so much must be seen on A.
WORTH = 0.5
# By which older steps count less.
MEMORY = 0.7
MOST_DOUBLINGS = 40
# Parameters times samples that keep a CPU busy: with less a product hardly takes less time. A GPU
# needs a hundred times as many.
CPU_WORK = 25_000_000

DOUBLINGS, EXPECTED, PROMISED = "set_doublings", "set_expected", "set_promised"


def least_samples(parameters: FlatParameters) -> int:
    """With how many samples sets begin, if not with N/K: fewer for a large model on a CPU."""
    if parameters.device.type != "cpu":
        return SMALLEST
    return min(SMALLEST, max(FEWEST, CPU_WORK // parameters.numel))


def begin(group: dict[str, Any]) -> None:
    """Make the entries of a parameter group that has none."""
    group.setdefault(DOUBLINGS, 0)
    group.setdefault(EXPECTED, math.nan)
    group.setdefault(PROMISED, 0.0)


def learn(group: dict[str, Any], result: StepResult, *, same_data: bool = True) -> None:
    """What a step says of the steps before it, and of its own worth.

    Args:
        group: with the entries, which are updated.
        result: of the step.
        same_data: whether it had the data of the step before.
    """
    begin(group)  # a state that was loaded may be from sets that did not grow
    if not same_data:
        group[EXPECTED], group[PROMISED] = math.nan, 0.0
    # EXPECTED is what the loss on A would be without the last steps, the older ones discounted.
    seen = group[EXPECTED] - result.loss
    too_small = seen < WORTH * group[PROMISED] or result.status is Status.NO_DECREASE
    everything = result.curvature_samples == result.objective_samples == result.samples
    if too_small and not everything:
        group[DOUBLINGS] = min(group[DOUBLINGS] + 1, MOST_DOUBLINGS)
        group[EXPECTED], group[PROMISED] = math.nan, 0.0
    elif result.status is Status.MOVED:
        group[EXPECTED] = result.loss + (0.0 if math.isnan(seen) else MEMORY * seen)
        group[PROMISED] = MEMORY * group[PROMISED] + result.loss_before - result.loss_after


class LastData:
    """What data the last step had, without holding on to them."""

    def __init__(self) -> None:
        self._first: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_first": None}  # a copy will see other objects

    def replace(self, data: Any) -> bool:
        """Take note of the data of a step; whether they are those of the step before.

        They are if their first tensor, or their dataset or loader, is the same object. What was
        not seen before counts as the same, so that a run that is resumed goes on alike.
        """
        while isinstance(data, list | tuple | Mapping) and data:
            data = next(iter(data.values() if isinstance(data, Mapping) else data))
        same = self._first is None or self._first() is data
        try:
            self._first = weakref.ref(data)
        except TypeError:
            self._first = None
        return same
