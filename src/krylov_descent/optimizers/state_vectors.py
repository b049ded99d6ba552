"""Vectors that an optimiser keeps between steps, stored in pieces with the parameters.

The state of a parameter has the parameter's shape and lives in `state`, as torch.optim and
checkpoint tools expect. The methods use one vector [n] over all parameters.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.objective import Objective


class StateVectors(torch.optim.Optimizer):
    """A torch optimiser whose state can be read and written as vectors [n].

    Attributes:
        objective: whose parameters the vectors belong to.
    """

    objective: Objective

    def _let_state_follow(self) -> None:
        """Convert the state to the parameters' dtype and device, which may have changed."""
        parameters = self.objective.parameters
        dtype, device = parameters.dtype, parameters.device
        for p in parameters.tensors:
            state = self.state.get(p, {})
            for key, kept in state.items():
                moved = isinstance(kept, Tensor) and (kept.dtype != dtype or kept.device != device)
                if moved and kept.shape == p.shape:
                    state[key] = kept.to(device, dtype)

    def _flat_state(self, key: str) -> Tensor:
        """The state of all parameters under a key, as a flat vector [n]; zeros where there is none.

        Raises:
            RuntimeError: the state has the shapes of another model.
        """
        parameters, state, none = self.objective.parameters, self.state, dict[str, Any]()
        pieces = [state.get(p, none).get(key) for p in parameters.tensors]
        names = self.objective.network.names
        for name, p, piece in zip(names, parameters.tensors, pieces, strict=True):
            if piece is not None and piece.shape != p.shape:
                raise RuntimeError(
                    f"the state is of another model: `{key}` of {name} has shape "
                    f"{tuple(piece.shape)}, the parameter {tuple(p.shape)}"
                )
        return parameters.flatten(pieces)

    def _get_vector(self, key: str) -> Tensor | None:
        """The state under a key as a flat vector [n], or None if it is zero everywhere."""
        vector = self._flat_state(key)
        return vector if bool(vector.any()) else None

    def _set_pieces(self, key: str, pieces: Sequence[Tensor]) -> None:
        """Store a vector as state, in pieces that are new tensors and belong to nobody else."""
        for p, piece in zip(self.objective.parameters.tensors, pieces, strict=True):
            self.state[p][key] = piece

    def _push_pieces(self, keys: Sequence[str], pieces: Sequence[Tensor]) -> None:
        """Store a vector under the first key; each older vector moves to the next key.

        The vector under the last key is dropped and not overwritten, because a state dict may share
        it. Afterwards all keys exist, because checkpoint tools need to know them from the first
        step on.

        Args:
            keys: newest first.
            pieces: of the vector, new tensors that nobody else writes to.
        """
        states = [self.state[p] for p in self.objective.parameters.tensors]
        if any(key not in state for state in states for key in keys):
            self._zero_state(*keys)
        moves = list(pairwise(reversed(keys)))
        for state, piece in zip(states, pieces, strict=True):
            for older, newer in moves:
                state[older] = state[newer]
            state[keys[0]] = piece

    def _zero_state(self, *keys: str) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                for key in keys:
                    if p.requires_grad and key not in self.state[p]:
                        self.state[p][key] = torch.zeros_like(p)

    def _learning_rates(self) -> list[float]:
        """`lr` of each trainable tensor, in the order of the flat vector."""
        return [
            float(group["lr"])
            for group in self.param_groups
            for p in group["params"]
            if p.requires_grad
        ]

    @property
    def _takes_whole_steps(self) -> bool:
        """Whether `lr` is 1 for all trainable parameters."""
        return all(
            float(group["lr"]) == 1.0
            for group in self.param_groups
            if any(p.requires_grad for p in group["params"])
        )

    def _scale_by_learning_rate(self, step: Tensor, *, back: bool = False) -> bool:
        """Multiply a step [n] by `lr`, in place. Returns False if `lr` is 1 everywhere.

        Args:
            step: overwritten.
            back: divide by `lr` instead; pieces whose `lr` is 0 stay as they are.
        """
        if self._takes_whole_steps:
            return False
        rates = self._learning_rates()
        if back:
            rates = [1 / rate if rate else 1.0 for rate in rates]
        for piece, rate in zip(self.objective.parameters.pieces(step), rates, strict=True):
            piece.mul_(rate)
        return True
