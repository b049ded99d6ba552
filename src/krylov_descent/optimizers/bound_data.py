"""Data that are bound to an optimiser, for frameworks that call a bare `step()`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from krylov_descent.objective.batches import as_samples


class Optimizer(Protocol):
    """What a step on bound data needs of an optimiser."""

    param_groups: list[dict[str, Any]]

    def _create_state(self) -> None: ...


@dataclass(slots=True)
class BoundData:
    """The data of every step that is called without data.

    They are in an object of their own because Lightning wraps an optimiser in an object that reads
    the optimiser's attributes but sets its own.

    Attributes:
        data: None if each step is given its data.
    """

    data: Any = None

    def bind(self, data: Any) -> None:
        """Keep the data; raises TypeError or ValueError if a step could not use them."""
        if isinstance(data, Iterator):
            raise TypeError(
                f"every step iterates over bound data, and a {type(data).__name__} can be iterated "
                "over only once: bind (inputs, targets), a Dataset, a DataLoader or a list of "
                "batches"
            )
        if data is not None:
            as_samples(data, may_be_empty=True)
        self.data = data

    def serves(self, data: Any, closure: Any = None) -> bool:
        """Whether a step with these arguments is a step on the bound data."""
        return self.data is not None and (data is None or (closure is None and is_closure(data)))


def begin(optimizer: Optimizer, closure: Callable[[], Any] | None) -> bool:
    """Call the closure before a step on the bound data.

    Returns:
        Whether to make a step; False for a checkpoint tool, for which the state is created.

    Raises:
        TypeError: there are gradients, which the closure or the caller made in vain.
    """
    if is_of_checkpoint_tool(optimizer.param_groups):
        optimizer._create_state()
        return False
    if closure is not None:
        with torch.enable_grad():  # as torch.optim does
            closure()
    if has_gradients(optimizer.param_groups):
        raise TypeError(
            f"{type(optimizer).__name__} makes its own gradients, of the bound data, and found "
            "others: leave out loss.backward(), or call optimizer.step(data=data, "
            "closure=closure) where a framework's closure calls it, which ignores them"
        )
    return True


def is_closure(data: Any) -> bool:
    """Whether the argument in the place of the data is the closure of torch.optim's `step`."""
    return callable(data) and not isinstance(data, Dataset | DataLoader)


def has_gradients(groups: list[dict[str, Any]]) -> bool:
    """Whether any parameter has a gradient that is not zero."""
    return any(
        p.grad is not None and bool(p.grad.any()) for group in groups for p in group["params"]
    )


def is_of_checkpoint_tool(groups: list[dict[str, Any]]) -> bool:
    """Whether a bare step is a checkpoint tool's, which expects that it only creates the state.

    Such a tool sets the gradients of what is trained and all learning rates to zero first.
    """
    trained = [p for group in groups for p in group["params"] if p.requires_grad]
    return (
        all(p.grad is not None for p in trained)
        and not has_gradients(groups)
        and all(float(group.get("lr", 0.0)) == 0 for group in groups)
    )
