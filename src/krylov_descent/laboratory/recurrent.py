"""Recurrent networks of plain layers: a tanh net and an LSTM, one loop over the time steps.

Written with Linear layers and not with `nn.RNN`, which has no second derivative on a GPU and does
not go through vmap.

**Padding.** Sequences of a batch are made equally long by zeros in front. The last input is 1 on
every step of a sequence, so its weights are the biases, and there is no other bias: a padded step
has no input at all, and a state that is still zero stays exactly zero.
"""

import math
from abc import abstractmethod
from collections import deque
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.initialization import INCOMING, sparse

Cell = Literal["rnn", "lstm"]

State = tuple[Tensor, ...]


class Recurrence(nn.Module):
    """Sequences [n, steps, inputs] to the last hidden states, [n, units] or [n, answers, units].

    Args:
        inputs: numbers per step, with the 1 that stands for the bias.
        units: of the hidden state.
        answers: how many of the last states are given out.
        device: of the parameters.
        dtype: of the parameters.
    """

    gates: int  # numbers per unit that a step computes

    def __init__(
        self,
        inputs: int,
        units: int,
        answers: int = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.units, self.answers = units, answers
        width = self.gates * units
        self.inputs = nn.Linear(inputs, width, bias=False, device=device, dtype=dtype)
        self.recurrent = nn.Linear(units, width, bias=False, device=device, dtype=dtype)

    def forward(self, sequences: Tensor) -> Tensor:
        """One product for the inputs of all steps, then step by step."""
        zero = sequences.new_zeros(len(sequences), self.units)
        state = self.beginning(zero)
        last: deque[Tensor] = deque(maxlen=self.answers)
        for step in self.inputs(sequences).unbind(1):
            state = self.advance(step + self.recurrent(state[0]), state)
            last.append(state[0])
        return last[0] if self.answers == 1 else torch.stack(list(last), 1)

    @abstractmethod
    def beginning(self, zero: Tensor) -> State:
        """The state before the first step, made of zeros [n, units]; the hidden state is first."""

    @abstractmethod
    def advance(self, total: Tensor, state: State) -> State:
        """The next state from the units' total input [n, gates · units]."""


class TanhRecurrence(Recurrence):
    """hₜ = tanh(U xₜ + W hₜ₋₁)."""

    gates = 1

    def beginning(self, zero: Tensor) -> State:
        return (zero,)

    def advance(self, total: Tensor, state: State) -> State:
        return (total.tanh(),)


class LstmRecurrence(Recurrence):
    """cₜ = f·cₜ₋₁ + i·g and hₜ = o·tanh(cₜ), with gates in the order i, f, o, g.

    The logistic ones (i, f, o) stand side by side so that one operation computes them.
    """

    gates = 4

    def beginning(self, zero: Tensor) -> State:
        return zero, zero

    def advance(self, total: Tensor, state: State) -> State:
        logistic, candidate = total.split([3 * self.units, self.units], 1)
        i, f, o = logistic.sigmoid().chunk(3, 1)
        c = f * state[1] + i * candidate.tanh()
        return o * c.tanh(), c


class PositionsLast(nn.Module):
    """[n, answers, classes] to [n, classes, answers], as torch's cross-entropy wants it."""

    def forward(self, outputs: Tensor) -> Tensor:
        """The same numbers, seen otherwise."""
        return outputs.transpose(1, 2)


def recurrent_network(
    cell: Cell,
    inputs: int,
    units: int,
    outputs: int,
    answers: int = 1,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """Sequences [n, steps, inputs] to [n, outputs], or [n, outputs, answers] for several.

    Args:
        cell: "rnn" (tanh) or "lstm".
        inputs: numbers per step, with the 1 that stands for the bias.
        units: of the hidden state.
        outputs: numbers per answer.
        answers: how many of the last steps give one.
        device: of the parameters.
        dtype: of the parameters.
    """
    if cell not in get_args(Cell):
        raise unknown_name("cell", str(cell), get_args(Cell))
    kind = TanhRecurrence if cell == "rnn" else LstmRecurrence
    layers: list[nn.Module] = [
        kind(inputs, units, answers, device=device, dtype=dtype),
        nn.Linear(units, outputs, device=device, dtype=dtype),
    ]
    return nn.Sequential(*layers, *([PositionsLast()] if answers > 1 else []))


@torch.no_grad()
def initialize_recurrent(
    model: nn.Module,
    seed: int,
    *,
    orthogonal: bool = False,
    input_scale: float = 0.25,
    forget_bias: float = 1.0,
) -> None:
    """Starting weights, the same for a seed on any device.

    15 incoming weights per unit: recurrent and output ones from N(0, 1)/√15, input ones from
    N(0, 1) · `input_scale`. Biases are 0, but for the forget gates of an LSTM. For a tanh net the
    defaults are those of Martens & Sutskever 2011.

    Args:
        model: as `recurrent_network` makes it; changed in place.
        seed: the same seed gives the same weights.
        orthogonal: the recurrent weights are a random orthogonal matrix instead (one for each
            gate), which neither shrinks nor stretches a state in any direction.
        input_scale: how strongly inputs disturb the state.
        forget_bias: of an LSTM's forget gates; with b it begins by remembering for about eᵇ steps.
    """
    generator = torch.Generator().manual_seed(seed)
    scale = 1 / math.sqrt(INCOMING)
    for module in model.modules():
        if isinstance(module, Recurrence):
            units = module.units
            make = _orthogonal if orthogonal else _sparse
            weights = [make(units, generator) for _ in range(module.gates)]
            module.recurrent.weight.copy_(torch.cat(weights))
            outputs, numbers = module.inputs.weight.shape
            weight, bias = sparse(outputs, numbers - 1, generator)
            module.inputs.weight.copy_(torch.cat([input_scale * weight, bias[:, None]], 1))
            if isinstance(module, LstmRecurrence):
                module.inputs.weight[units : 2 * units, -1] = forget_bias
    for module in model.children():
        if isinstance(module, nn.Linear):
            weight, bias = sparse(module.out_features, module.in_features, generator)
            module.weight.copy_(scale * weight)
            module.bias.copy_(bias)


def _sparse(units: int, generator: torch.Generator) -> Tensor:
    weight, _ = sparse(units, units, generator)
    return weight / math.sqrt(INCOMING)


def _orthogonal(units: int, generator: torch.Generator) -> Tensor:
    """Uniformly distributed: the Q of a normal matrix whose R has a positive diagonal."""
    normal = torch.randn(units, units, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(normal)
    uniform: Tensor = q * r.diagonal().sign()
    return uniform
