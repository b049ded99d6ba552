"""What the sequence tasks are answered with: losses to train on, and which answers are wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent.laboratory.problems.problem import (
    PerSample,
    bernoulli_cross_entropy,
    softmax_cross_entropy,
    wrong_class,
)

# The largest error of a sum or product that counts as right.
TOLERANCE = 0.04


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """(output - target)² of [n, 1] both, [n]."""
    return (outputs - targets).square().sum(1)


def pattern_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of logits [n, symbols, places] against symbols [n, places], summed over places [n]."""
    return F.cross_entropy(outputs, targets, reduction="none").sum(1)


def wrong_number(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the output [n, 1] is more than 0.04 away from the target, else 0 [n]."""
    return ((outputs - targets).abs() > TOLERANCE).any(1).to(outputs.dtype)


def wrong_bit(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the sign of the logit [n, 1] is not that of the bit, else 0 [n]."""
    return ((outputs > 0) != (targets > 0.5)).any(1).to(outputs.dtype)


def wrong_pattern(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where any place of [n, symbols, places] is not the target's, else 0 [n]."""
    return (outputs.argmax(1) != targets).any(1).to(outputs.dtype)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What the net answers with, and how right that is."""

    kind: Literal["regression", "classification"]
    loss: PerSample
    criterion: Callable[[], nn.Module]
    wrong: PerSample


NUMBER = Question(
    kind="regression",
    loss=squared_error,
    criterion=partial(nn.MSELoss, reduction="sum"),
    wrong=wrong_number,
)
BIT = Question(
    kind="classification",
    loss=bernoulli_cross_entropy,
    criterion=partial(nn.BCEWithLogitsLoss, reduction="sum"),
    wrong=wrong_bit,
)
SYMBOL = Question(
    kind="classification",
    loss=softmax_cross_entropy,
    criterion=nn.CrossEntropyLoss,
    wrong=wrong_class,
)
PATTERN = Question(
    kind="classification",
    loss=pattern_cross_entropy,
    criterion=partial(nn.CrossEntropyLoss, reduction="sum"),
    wrong=wrong_pattern,
)
