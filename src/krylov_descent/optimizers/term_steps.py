"""Steps on an objective of terms, which have their own samples."""

from dataclasses import replace
from typing import Any, Protocol

import torch

from krylov_descent.objective.contract_probe import buffers_kept
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.terms import Terms
from krylov_descent.optimizers.bound_data import is_of_checkpoint_tool
from krylov_descent.optimizers.result import Status, StepResult


class Optimizer(Protocol):
    """What a step on terms needs of an optimiser."""

    objective: Objective
    param_groups: list[dict[str, Any]]

    def _create_state(self) -> None: ...


def begin(optimizer: Optimizer, terms: Terms, data: Any, closure: Any) -> bool:
    """Check the arguments of `step`, draw points and evaluate the terms.

    Returns:
        Whether to make a step; False for a checkpoint tool, for which the state is created.

    Raises:
        TypeError: data were given.
        RuntimeError: there are several ranks.
    """
    objective, groups = optimizer.objective, optimizer.param_groups
    if callable(data) and closure is None:  # torch.optim's step(closure)
        data, closure = None, data
    if data is not None:
        raise TypeError(
            "the terms have their own points and data: call optimizer.step() without any"
        )
    if objective.ranks.size > 1:
        raise RuntimeError(
            f"terms are trained in one process, and there are {objective.ranks.size}: give (model, "
            "loss) and the data of each rank instead"
        )
    if is_of_checkpoint_tool(groups):
        optimizer._create_state()
        return False
    with torch.enable_grad(), buffers_kept(objective.network.model):
        if closure is not None:
            closure()
        objective.refresh(groups)
        terms.prepare(objective.losses_by_term, objective.parameters.tensors[0], groups[0])
    return True


def reported(result: StepResult, terms: Terms | None) -> StepResult:
    """The result of a step, with the terms that were evaluated before it."""
    if terms is None:
        return result
    found, reason = terms.losses, result.reason
    if found.trouble and result.status is Status.NOT_FINITE:
        reason = found.trouble
    return replace(result, terms=found.terms, held_out=found.held_out, reason=reason)
