"""Sets B and C that grow, `subset_size="growing"`.

A step is the best point of its subspace on C, so it is worth less on all the data. How much less
is known without any further work: the next step finds the loss on A. Small sets are cheap, and
early in training what they say of a step holds for all the data; when less than half of it does,
they are doubled. (Byrd, Chin, Nocedal and Wu 2012 grow sets by the variance of gradients.)

The memory of that is three numbers in a parameter group, where checkpoints have them.
"""

import math
from typing import Any

from krylov_descent.optimizers.result import Status, StepResult

# Of what the last steps promised on C, so much must be seen on A.
WORTH = 0.5
# By which older steps count less.
MEMORY = 0.7
MOST_DOUBLINGS = 40

DOUBLINGS, EXPECTED, PROMISED = "set_doublings", "set_expected", "set_promised"


def begin(group: dict[str, Any]) -> None:
    """Make the entries of a parameter group that has none."""
    group.setdefault(DOUBLINGS, 0)
    group.setdefault(EXPECTED, math.nan)
    group.setdefault(PROMISED, 0.0)


def learn(group: dict[str, Any], result: StepResult) -> None:
    """What a step says of the steps before it, and of its own worth.

    Args:
        group: with the entries, which are updated.
        result: of the step.
    """
    begin(group)  # a state that was loaded may be from sets that did not grow
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
