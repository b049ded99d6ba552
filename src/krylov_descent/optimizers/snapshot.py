"""A snapshot of all that a step writes to, except the parameters, for undoing a failed step.

A step also learns about the model: which layers to trust, how much memory a sample takes, which
route of differentiation works. This knowledge decides how the next step rounds, so it is undone
too. The step after an error is bit for bit the step that would have been made without the error.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """State, parameter groups and attributes of objects, for restoring them later.

    Args:
        optimizer: whose state and parameter groups are saved.
        learners: objects of the library. A step may replace their attributes, or add to attributes
            that are containers.
        foreign: objects of the user, such as a preconditioner. A step may also write into their
            tensors.

    Cost: only the tensors of foreign objects are copied. Tensors of the state need no copy, because
    a step replaces them and does not write into them.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        learners: Iterable[object],
        foreign: Iterable[object],
    ) -> None:
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._state = {p: dict(kept) for p, kept in optimizer.state.items()}
        things = [thing for thing in (*learners, *foreign) if hasattr(thing, "__dict__")]
        self._attributes = [(vars(thing), _copied(vars(thing))) for thing in things]
        tensors = [t for thing in foreign for t in _tensors_in(getattr(thing, "__dict__", {}))]
        self._numbers = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def restore_groups(self) -> None:
        """Restore the entries of the parameter groups."""
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)

    def restore_state(self) -> None:
        """Restore the tensors of the state."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)

    @torch.no_grad()
    def restore_knowledge(self) -> None:
        """Restore the attributes of the learners and the foreign objects."""
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for tensor, numbers in self._numbers:
            tensor.copy_(numbers)


def _copied(value: Any) -> Any:
    """Copy nested dicts, lists and sets, but not the objects in them."""
    if type(value) is dict:
        return {key: _copied(inside) for key, inside in value.items()}
    if type(value) in (list, set):
        return type(value)(map(_copied, value))
    return value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, list | tuple | set):
        for inside in value:
            yield from _tensors_in(inside)
