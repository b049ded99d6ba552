"""What KSD changes after a step that found no decrease.

If nothing in a step is random (B = C = A), a refused step would repeat itself bit for bit forever.
So each refused step changes the next one, in this order:

1. B and C are drawn anew with four times as many samples, until they are all of A. Derivatives are
   no longer computed in TensorFloat-32.
2. When B and C are all of A, or the user gave them, the basis becomes twice as long, until it spans
   the whole space or exceeds the memory for activations.

Each step that is taken undoes the last change. When nothing is left to change, the result says so.
Within a step, a search that stands at a kink goes on with a bundle of gradients (see `bundle`).

The two counters live in a parameter group, so that a resumed run continues identically.
"""

from dataclasses import replace
from typing import Any

from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult

LARGER_SETS = "larger_sets"  # how often B and C were enlarged
LONGER_BASIS = "longer_basis"  # the dimension of the longer basis; 0 for the dimension K asked for
ENTRIES = (LARGER_SETS, LONGER_BASIS)
SET_GROWTH, BASIS_GROWTH = 4, 2


def begin(group: dict[str, Any]) -> None:
    """Create missing entries in a parameter group."""
    for entry in ENTRIES:
        group.setdefault(entry, 0)


def is_under_way(group: dict[str, Any]) -> bool:
    """Whether the sets or the basis are larger than asked for."""
    return bool(group[LARGER_SETS] or group[LONGER_BASIS])


def set_growth(group: dict[str, Any]) -> int:
    """The factor by which B and C are larger than asked for."""
    growth: int = SET_GROWTH ** group[LARGER_SETS]
    return growth


def is_refusal(result: StepResult) -> bool:
    """Whether the step would be refused again if nothing changed."""
    return result.status is Status.NO_DECREASE and result.reason != SCALED_AWAY


def take_back(group: dict[str, Any], dimension: int) -> None:
    """Undo the last change, after a step that was taken.

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
    """Choose what the next step changes, after a refused step.

    Args:
        group: with the entries, which are updated.
        result: of the refused step.
        dimension: K as asked for.
        longest: the most directions that a basis can have.
        by_hand: whether the user gave B or C.

    Returns:
        The result, with the change added to its reason.
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
