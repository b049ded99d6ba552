"""What must be equal on all ranks: the settings of an optimiser, and the tensors of its loss.

Ranks compare them before each step (see `rank_agreement`). A difference would let them go apart
without a word.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from krylov_descent.objective.objective import Objective
from krylov_descent.runtime.descriptions import described, described_modules, name_of, tensors_of


class Shared(Protocol):
    """What is read of an optimiser."""

    objective: Objective
    param_groups: list[dict[str, Any]]
    learnt: tuple[str, ...]


def texts(
    optimizer: Shared,
    options: Mapping[str, Any],
    given: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> dict[str, str]:
    """All settings that must be equal, as text by name.

    Args:
        optimizer: of this rank.
        options: its settings outside the parameter groups.
        given: optional sets of samples by argument name, None if left out.
        tensors: of its objective, whose shapes and dtypes are told.
    """
    objective, network = optimizer.objective, optimizer.objective.network
    told: dict[str, Any] = {"the optimiser": type(optimizer).__name__, **options}
    for name, data in given.items():
        told[f"`{name}`"] = "left out" if data is None else "given"
    told |= described("the loss", network.loss.module)
    told["`forward`"] = name_of(network.forward)
    for name, tensor in tensors.items():
        told[name] = f"{tuple(tensor.shape)} {tensor.dtype}"
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names", *optimizer.learnt):
                told[f"`{key}` of parameter group {index}"] = value
    told |= described_modules(network.eager)
    told["the order of what is trained"] = ", ".join(network.names)
    if objective.terms is not None:
        told |= objective.terms.description()
    return {name: str(value) for name, value in told.items()}


def tensors(objective: Objective) -> dict[str, Tensor]:
    """All tensors on which the loss depends, by name; of data those of terms alone."""
    network = objective.network
    trained = set(network.names)
    found: dict[str, Tensor] = {
        f"the {'' if name in trained else 'frozen '}parameter {name}": p
        for name, p in network.eager.named_parameters()
    }
    found |= {f"the buffer {name}": b for name, b in network.eager.named_buffers()}
    if objective.terms is not None:
        found |= objective.terms.tensors()
    return found | tensors_of("the loss", network.loss.module)
