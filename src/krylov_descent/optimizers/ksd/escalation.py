"""What changes after a step that found no decrease.

Where nothing in a step is random (B = C = A) a refused step would be made again, bit for bit, for
ever. So each refused step changes the one after it, in this order:

1. B and C are other samples, four times as many, until they are all of A. Derivatives are no
   longer in TensorFloat-32.
2. When they are all of A, or were given by hand, the basis is twice as long, until it is the whole
   space or would take more than the memory for activations.

Each step that is taken takes the last change back. Inside a step, where the search stands at a
kink, it goes on with a bundle of gradients (see `bundle`). When nothing is left to change, the
result says so.

The two numbers live in a parameter group, so that a resumed run goes on alike.
"""

from dataclasses import replace
from typing import Any

from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult

LARGER_SETS = "larger_sets"  # how often they were made larger
LONGER_BASIS = "longer_basis"  # its dimension; 0 for the one that was asked for
ENTRIES = (LARGER_SETS, LONGER_BASIS)
SET_GROWTH, BASIS_GROWTH = 4, 2


def begin(group: dict[str, Any]) -> None:
    """Make the entries of a parameter group that has none."""
    for entry in ENTRIES:
        group.setdefault(entry, 0)


def is_under_way(group: dict[str, Any]) -> bool:
    """Whether anything is other than asked for."""
    return bool(group[LARGER_SETS] or group[LONGER_BASIS])


def set_growth(group: dict[str, Any]) -> int:
    """How many times as many samples as asked for B and C have."""
    growth: int = SET_GROWTH ** group[LARGER_SETS]
    return growth


def is_refusal(result: StepResult) -> bool:
    """Whether the step would be refused again if nothing changed."""
    return result.status is Status.NO_DECREASE and result.reason != SCALED_AWAY


def take_back(group: dict[str, Any], dimension: int) -> None:
    """After a step that was taken: undo the last change.

    Args:
        group: with the entries, which are updated.
        dimension: K as asked for.
    """
    if group[LONGER_BASIS]:
        shorter = group[LONGER_BASIS] // BASIS_GROWTH
        group[LONGER_BASIS] = shorter if shorter > dimension else 0
    elif group[LARGER_SETS]:
        group[LARGER_SETS] -= 1


def escalate(
    group: dict[str, Any], result: StepResult, dimension: int, longest: int, *, by_hand: bool
) -> StepResult:
    """After a refused step: choose what the next one changes.

    Args:
        group: with the entries, which are updated.
        result: of the step.
        dimension: K as asked for.
        longest: the longest basis that is possible.
        by_hand: whether B or C were given.

    Returns:
        The result, whose reason says what the next step changes.
    """
    all_samples = result.curvature_samples == result.objective_samples == result.samples
    now = max(dimension, group[LONGER_BASIS])
    longer = min(BASIS_GROWTH * now, longest)
    if not (all_samples or by_hand):
        group[LARGER_SETS] += 1
        change = "the next step has larger sets B and C"
    elif longer > now:
        group[LONGER_BASIS] = longer
        change = f"the next step has a basis of {longer}"
    else:
        change = "nothing is left to change but the precision of the parameters"
    return replace(result, reason=f"{result.reason}; {change}")
