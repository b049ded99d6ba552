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

The counts live in a parameter group, so that a resumed run goes on alike.
"""

from typing import Any

from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult

LARGER_SETS, LONGER_BASIS = "larger_sets", "longer_basis"
SET_GROWTH, BASIS_GROWTH = 4, 2


def begin(group: dict[str, Any]) -> None:
    """Make the entries of a parameter group that has none."""
    group.setdefault(LARGER_SETS, 0)
    group.setdefault(LONGER_BASIS, 0)


def refusals(group: dict[str, Any]) -> int:
    """How many changes are in force."""
    return int(group[LARGER_SETS]) + int(group[LONGER_BASIS])


def set_growth(group: dict[str, Any]) -> int:
    """How many times as many samples as asked for B and C have."""
    return SET_GROWTH ** int(group[LARGER_SETS])


def basis_dimension(group: dict[str, Any], dimension: int, longest: int) -> int:
    """K of the step, given the K asked for and the longest basis that is possible."""
    longer = dimension * BASIS_GROWTH ** int(group[LONGER_BASIS])
    return max(dimension, min(longer, longest))


def learn(
    group: dict[str, Any], result: StepResult, dimension: int, longest: int, *, by_hand: bool
) -> str | None:
    """Choose what the next step changes.

    Args:
        group: with the entries, which are updated.
        result: of the step.
        dimension: K as asked for.
        longest: the longest basis that is possible.
        by_hand: whether B or C were given.

    Returns:
        The change in words, None for a step after which nothing is to change.
    """
    if result.status is Status.MOVED:
        for key in (LONGER_BASIS, LARGER_SETS):
            if group[key]:
                group[key] -= 1
                break
        return None
    if result.status is not Status.NO_DECREASE or result.reason == SCALED_AWAY:
        return None
    if not by_hand and min(result.curvature_samples, result.objective_samples) < result.samples:
        group[LARGER_SETS] += 1
        return "the next step has larger sets B and C"
    before = basis_dimension(group, dimension, longest)
    group[LONGER_BASIS] += 1
    after = basis_dimension(group, dimension, longest)
    if after > before:
        return f"the next step has a basis of {after}"
    group[LONGER_BASIS] -= 1
    return "nothing is left to change"
