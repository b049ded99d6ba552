"""Vectors that an optimiser keeps from step to step, in pieces that belong to the parameters.

State that belongs to a parameter has its shape and lives in `state`, as torch.optim and checkpoint
tools expect. The methods speak of one vector [n] over all parameters.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.objective import Objective


class StateVectors(torch.optim.Optimizer):
    """A torch optimiser whose state can be read and written as vectors.

    Attributes:
        objective: whose parameters they belong to.
    """

    objective: Objective

    def _let_state_follow(self) -> None:
        """Where the model was given another dtype since the last step, so are the vectors kept."""
        parameters = self.objective.parameters
        dtype, device = parameters.dtype, parameters.device
        for p in parameters.tensors:
            state = self.state.get(p, {})
            for key, kept in state.items():
                moved = isinstance(kept, Tensor) and (kept.dtype != dtype or kept.device != device)
                if moved and kept.shape == p.shape:
                    state[key] = kept.to(device, dtype)

    def _flat_state(self, key: str) -> Tensor:
        """Per-parameter state as one flat vector; zeros where there is none."""
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
        """The same, but None where it is zero."""
        vector = self._flat_state(key)
        return vector if bool(vector.any()) else None

    def _set_pieces(self, key: str, pieces: Sequence[Tensor]) -> None:
        """Keep a vector as state, each piece with its parameter: new tensors of nobody else's."""
        for p, piece in zip(self.objective.parameters.tensors, pieces, strict=True):
            self.state[p][key] = piece

    def _push_pieces(self, keys: Sequence[str], pieces: Sequence[Tensor]) -> None:
        """Keep a vector by the first key; what was there goes on to the next one, and so on.

        The last one's is dropped, not written into: a state that was handed out or loaded may
        share it. All keys are there afterwards: checkpoint tools want to know them from the first
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
        """Whether `lr` is 1 for everything that is trained."""
        return all(
            float(group["lr"]) == 1.0
            for group in self.param_groups
            if any(p.requires_grad for p in group["params"])
        )

    def _scale_by_learning_rate(self, step: Tensor, *, back: bool = False) -> bool:
        """Multiply a step [n] by `lr`, in place; whether that changes it.

        Args:
            step: overwritten.
            back: undo it, but for what an `lr` of 0 made of it.
        """
        if self._takes_whole_steps:
            return False
        rates = self._learning_rates()
        if back:
            rates = [1 / rate if rate else 1.0 for rate in rates]
        for piece, rate in zip(self.objective.parameters.pieces(step), rates, strict=True):
            piece.mul_(rate)
        return True
