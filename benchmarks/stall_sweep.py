"""Small nets with kinks, trained with the defaults until they can go no further: do they get there?

ReLU nets on few samples, where nothing in a step is random, are what a search gets stuck on: a step
that is refused would be refused for ever. A run has stalled if more than `MOST_REFUSED` steps in a
row were refused before its true end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from krylov_descent import KSD
from krylov_descent.optimizers.true_end import truly_ended

CPU = torch.device("cpu")
MOST_REFUSED = 3

Problem = tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]


def _mlp(activation: type[nn.Module], *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), activation()]
    return nn.Sequential(*layers[:-1])


def _classification(samples: int, dtype: torch.dtype, activation: type[nn.Module]) -> Problem:
    """Labels without a rule: three classes of six numbers."""
    inputs = torch.randn(samples, 6, dtype=dtype)
    targets = torch.randint(0, 3, (samples,))
    return _mlp(activation, 6, 8, 8, 3).to(dtype), nn.CrossEntropyLoss(), (inputs, targets)


def _regression(samples: int, dtype: torch.dtype, activation: type[nn.Module]) -> Problem:
    """A wave with noise."""
    inputs = torch.randn(samples, 6, dtype=dtype)
    wave = torch.sin(inputs.sum(1, keepdim=True))
    targets = wave + 0.1 * torch.randn(samples, 1, dtype=dtype)
    return _mlp(activation, 6, 16, 16, 1).to(dtype), nn.MSELoss(), (inputs, targets)


KINDS: dict[str, Callable[[], Problem]] = {
    "classification, ReLU, N = 100, float64": lambda: _classification(100, torch.float64, nn.ReLU),
    "classification, ReLU, N = 60, float32": lambda: _classification(60, torch.float32, nn.ReLU),
    "regression, ReLU, N = 200, float64": lambda: _regression(200, torch.float64, nn.ReLU),
    "regression, ReLU, N = 200, float32": lambda: _regression(200, torch.float32, nn.ReLU),
    "regression, LeakyReLU, N = 200, float64": lambda: _regression(
        200, torch.float64, nn.LeakyReLU
    ),
    "classification, tanh, N = 60, float32": lambda: _classification(60, torch.float32, nn.Tanh),
}


@dataclass(frozen=True, slots=True)
class Run:
    """How a training ended.

    Attributes:
        kind: of problem.
        seed: of net and data.
        steps: that were made.
        loss: at the end.
        gradient_norm: there.
        refused: the most refused steps in a row.
        stalled: whether they were before the true end.
        passes: over the data.
    """

    kind: str
    seed: int
    steps: int
    loss: float
    gradient_norm: float
    refused: int
    stalled: bool
    passes: float


def train(kind: str, seed: int, steps: int, device: torch.device = CPU) -> Run:
    """Train with the defaults, until the true end, a stall, or so many steps."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, loss, (inputs, targets) = KINDS[kind]()
    model, data = model.to(device), (inputs.to(device), targets.to(device))
    optimizer = KSD(model, loss)
    first, refused, most, passes, made = 0.0, 0, 0, 0.0, 0
    stalled = ended = False
    while made < steps and not (stalled or ended):
        result = optimizer.step(data)
        made, passes = made + 1, passes + result.passes
        first = first or result.loss
        refused = 0 if result.status.moved else refused + 1
        most = max(most, refused)
        ended = truly_ended(result, first, inputs.dtype)
        stalled = refused > MOST_REFUSED and not ended
    return Run(kind, seed, made, result.loss, result.gradient_norm, most, stalled, passes)
