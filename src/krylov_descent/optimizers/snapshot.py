"""All that a step writes to beside the parameters, as it was before: a step that fails is undone.

What is learnt about a model on the way (which layers to trust, how much memory a sample takes,
which route of differentiation works) decides how the next step rounds. So it is undone, too: the
step after an error is the one that would have been made without it, bit for bit.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class Snapshot:
    """State, parameter groups and attributes of objects, to go back to.

    Args:
        optimizer: whose state and parameter groups are meant.
        learners: objects whose attributes a step may replace, or add to where they are containers.
        foreign: of these, objects of the user's, which may also write into their tensors.

    Cost: no vector is copied but those of foreign objects. Tensors of the state stay as they are:
    steps put others in their place.
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
        """Go back to the entries of the parameter groups."""
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)

    def restore_state(self) -> None:
        """Go back to the tensors of the state."""
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)

    @torch.no_grad()
    def restore_knowledge(self) -> None:
        """Go back to what the objects knew."""
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for tensor, numbers in self._numbers:
            tensor.copy_(numbers)


def _copied(value: Any) -> Any:
    """Containers copied, as deep as they are nested; what is in them is not."""
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
