"""Steps on an objective of terms, which have their own samples."""

from dataclasses import replace
from typing import Any, Protocol

import torch

from krylov_descent.objective.buffers import buffers_kept
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.terms import Terms
from krylov_descent.optimizers.bound_data import is_of_checkpoint_tool
from krylov_descent.optimizers.result import Status, StepResult


class Optimizer(Protocol):
    """What a step on terms needs of an optimiser."""

    objective: Objective
    param_groups: list[dict[str, Any]]

    def _create_state(self) -> None: ...


def begin(optimizer: Optimizer, data: Any, closure: Any) -> bool:
    """Check the arguments of `step`, and call the closure.

    Returns:
        Whether to make a step; False for a checkpoint tool, for which the state is created.

    Raises:
        TypeError: data were given.
    """
    if callable(data) and closure is None:  # torch.optim's step(closure)
        data, closure = None, data
    if data is not None:
        raise TypeError(
            "the terms have their own points and data: call optimizer.step() without any"
        )
    if is_of_checkpoint_tool(optimizer.param_groups):
        optimizer._create_state()
        return False
    if closure is not None:
        with torch.enable_grad(), buffers_kept(optimizer.objective.network.model):
            closure()
    return True


def draw(objective: Objective, group: dict[str, Any], given: dict[str, Any]) -> None:
    """Draw the points of terms, if there are terms. Nothing is sent.

    Args:
        objective: f.
        group: the first parameter group.
        given: sets of samples by argument name, None if left out.

    Raises:
        TypeError: sets were given beside terms.
    """
    if objective.terms is None:
        return
    if any(data is not None for data in given.values()):
        raise TypeError(
            f"{' and '.join(f'`{name}`' for name in given)} cannot be given beside terms: a "
            "term's `subset_size` says how many of its samples a step has"
        )
    with buffers_kept(objective.network.model):
        objective.terms.draw(objective.parameters.tensors[0], group)


def evaluate(objective: Objective, group: dict[str, Any]) -> None:
    """Evaluate the terms before a step, if there are terms, on all ranks together."""
    if objective.terms is not None:
        objective.ranks.enter("terms")
        like = objective.parameters.tensors[0]
        objective.terms.evaluate(objective.losses_by_term, like, group, objective.ranks)


def reported(result: StepResult, terms: Terms | None) -> StepResult:
    """The result of a step, with the terms that were evaluated before it."""
    if terms is None:
        return result
    found, reason = terms.losses, result.reason
    if found.trouble and result.status is Status.NOT_FINITE:
        reason = found.trouble
    return replace(result, terms=found.terms, held_out=found.held_out, reason=reason)
