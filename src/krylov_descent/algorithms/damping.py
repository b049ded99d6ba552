"""The damping λ of a quadratic model, adapted after Levenberg and Marquardt (Martens 2010, 4.1).

The next step trusts the quadratic more or less, depending on how well the quadratic predicted the
last change of the objective.
"""

import math

# Below the first ratio the quadratic is trusted less, above the second more.
POOR_RATIO, GOOD_RATIO = 0.25, 0.75
RAISED, LOWERED = 3 / 2, 2 / 3


def reduction_ratio(change: float, predicted: float) -> float:
    """ρ: the change of the objective divided by the change that the quadratic predicted.

    Minus infinity if the objective rose or is not finite, or if the predicted change is zero.
    """
    if not change <= 0 or predicted == 0:
        return -math.inf
    return change / predicted


def adapted_damping(damping: float, ratio: float) -> float:
    """λ of the next step: × 3/2 if ρ < ¼, × 2/3 if ρ > ¾."""
    if ratio < POOR_RATIO:
        return damping * RAISED
    if ratio > GOOD_RATIO:
        return damping * LOWERED
    return damping
