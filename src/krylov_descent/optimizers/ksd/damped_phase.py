"""The first phase of a training with fewer residuals than parameters: damped steps.

A Krylov space of few directions has the sharp ones. A long search in it brings all residuals to
zero that these directions change, and what is left lies along flat ones, where later steps are
slow. A step in the span of damped Gauss-Newton directions goes along all of them from the start. So
the kind of the first steps decides how far a training comes, and what a step brings for its work
does not tell which kind is better (notes/2026-11-19-damped-directions-and-where-training-goes.md).

The phase has a plateau at first, then the loss falls by many orders of magnitude, and when it does
so no longer, Krylov steps follow.

Its memory is five numbers in a parameter group, so that a resumed run continues identically.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from krylov_descent.algorithms.damped_directions import least_damping
from krylov_descent.curvature.products import CurvatureProduct
from krylov_descent.optimizers.ksd import subset_growth
from krylov_descent.optimizers.result import StepResult

# Iterations of the search of a step, unless they were given.
ITERATIONS = 5
# The damping in the middle of the first step's, relative to the 1-norm of JJᵀ.
FIRST_DAMPING = 1e-3
# The phase ends when so many steps did not halve the loss; with the larger number as long as the
# loss is not below this part of the first one.
PATIENCE, PATIENCE_AT_FIRST, FALLEN = 40, 120, 1e-3
# Of fewer residuals a Krylov space of some dozens of directions has most of what they span, and
# Krylov steps are ahead in the first seconds (results/trials/damped_first.json).
FEWEST_RESIDUALS = 500
# On two cores a step with 1,020 takes half a second, and one with 3,400 2.5 s, where the plateau
# lasts for more than a minute.
MOST_RESIDUALS_ON_CPU = 1300
# In memory beside J: JJᵀ, with a damping, and its factor.
SYSTEMS = 3
OVER = -1

STEPS, DAMPING = "damped_steps", "damping"  # the number of such steps; OVER after the phase
FIRST_LOSS = "damped_first_loss"
HALVED_LOSS, HALVED_AT = "damped_halved_loss", "damped_halved_at"
ENTRIES = (STEPS, DAMPING, FIRST_LOSS, HALVED_LOSS, HALVED_AT)


def begin(group: dict[str, Any]) -> None:
    """Create missing entries. A training that has begun without the phase has none."""
    group.setdefault(STEPS, OVER if group["steps"] else 0)
    group.setdefault(DAMPING, FIRST_DAMPING)
    group.setdefault(FIRST_LOSS, math.inf)
    group.setdefault(HALVED_LOSS, math.inf)
    group.setdefault(HALVED_AT, 0)


def is_under_way(group: dict[str, Any]) -> bool:
    """Whether the next step is a damped one, if the objective allows it."""
    return bool(group[STEPS] != OVER)


def has_steps(group: dict[str, Any]) -> bool:
    """Whether the phase is under way and has made a step."""
    return bool(group[STEPS] > 0)


def end(group: dict[str, Any]) -> None:
    """Make Krylov steps from now on; on all samples if there were damped steps, which had all."""
    if has_steps(group):
        subset_growth.take_all(group)
    group[STEPS] = OVER


def suits(product: CurvatureProduct) -> bool:
    """Whether there are many residuals, but fewer than parameters, with cheap dense algebra.

    Args:
        product: of the Gauss-Newton matrix over all samples.
    """
    objective = product.objective
    parameters = objective.parameters
    number = torch.finfo(parameters.dtype).bits // 8
    residuals = product.jacobian_bytes / (number * parameters.numel)
    most = parameters.numel - 1
    if parameters.device.type == "cpu":
        most = min(most, MOST_RESIDUALS_ON_CPU)
    memory = product.jacobian_bytes + SYSTEMS * number * residuals**2
    return FEWEST_RESIDUALS <= residuals <= most and memory <= objective.activation_memory


def learn(group: dict[str, Any], damping: float, before: float, after: float) -> str:
    """After a damped step: choose the damping of the next one, or end the phase.

    Args:
        group: with the entries, which are updated.
        damping: of the direction that the step was most along.
        before: the loss before the step.
        after: the loss after it.

    Returns:
        Why the phase is over, as a sentence; empty if it is not.
    """
    group[STEPS] += 1
    group[DAMPING] = max(damping, least_damping(torch.float64))
    if group[STEPS] == 1:
        group[FIRST_LOSS] = group[HALVED_LOSS] = before
    if after <= group[HALVED_LOSS] / 2:
        group[HALVED_LOSS], group[HALVED_AT] = after, group[STEPS]
    has_fallen = after < FALLEN * group[FIRST_LOSS]
    patience = PATIENCE if has_fallen else PATIENCE_AT_FIRST
    if group[STEPS] - group[HALVED_AT] < patience:
        return ""
    end(group)
    return f"{patience} damped steps did not halve the loss; Krylov steps follow"


def refused(group: dict[str, Any], result: StepResult) -> StepResult:
    """End the phase after a step that found no decrease, and add that to its reason."""
    end(group)
    return replace(result, reason=f"{result.reason}; Krylov steps follow")
