"""Losses with targets for given outputs, each beside the same loss written out by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

Tree = Any
Loss = Callable[[Tree, Tree], Tensor]

CLASSES = 3


@dataclass(frozen=True)
class LossCase:
    """A loss, targets for given outputs, and the same loss by hand: Σ numerators / normaliser."""

    loss: Loss
    targets: Tree
    numerators: Callable[[Tree], Tensor]
    normaliser: float


def _per_element(
    loss: Loss, targets: Tensor, elements: Callable[[Tensor, Tensor], Tensor], mean: bool = True
) -> LossCase:
    def numerators(outputs: Tensor) -> Tensor:
        rows = elements(outputs, targets).reshape(len(targets), -1)
        return rows.mean(1) if mean else rows.sum(1)

    return LossCase(loss, targets, numerators, len(targets))


def _mse(outputs: Tensor) -> LossCase:
    return _per_element(nn.MSELoss(), torch.randn_like(outputs), lambda z, t: (z - t) ** 2)


def _mse_sum(outputs: Tensor) -> LossCase:
    loss, targets = nn.MSELoss(reduction="sum"), torch.randn_like(outputs)
    return _per_element(loss, targets, lambda z, t: (z - t) ** 2, mean=False)


def _huber(outputs: Tensor) -> LossCase:
    def elements(z: Tensor, t: Tensor) -> Tensor:
        error = (z - t).abs()
        return torch.where(error < 0.7, error**2 / 2, 0.7 * (error - 0.35))

    return _per_element(nn.HuberLoss(delta=0.7), torch.randn_like(outputs), elements)


def _logistic(outputs: Tensor) -> LossCase:
    loss, targets = nn.BCEWithLogitsLoss(), torch.rand_like(outputs)
    return _per_element(loss, targets, lambda z, t: F.softplus(z) - t * z)


def _poisson(outputs: Tensor) -> LossCase:
    targets = torch.randint_like(outputs, 4)
    return _per_element(nn.PoissonNLLLoss(), targets, lambda z, t: z.exp() - t * z)


def _classes(outputs: Tensor, ignored: int | None = None) -> Tensor:
    """Every class somewhere, at every position of outputs [N, classes, …]."""
    shape = outputs[:, 0].shape
    classes = torch.arange(shape.numel()).reshape(shape) % CLASSES
    return classes if ignored is None else classes.where(classes != 1, ignored)


def _cross_entropy(outputs: Tensor) -> LossCase:
    classes = _classes(outputs)

    def numerators(z: Tensor) -> Tensor:
        chosen = -z.log_softmax(1).gather(1, classes.unsqueeze(1))
        return chosen.reshape(len(classes), -1).sum(1)

    return LossCase(nn.CrossEntropyLoss(), classes, numerators, classes.numel())


def _weighted_cross_entropy(outputs: Tensor) -> LossCase:
    """Class weights, ignored targets and label smoothing at once."""
    ignored, smoothing, weight = -7, 0.2, torch.tensor([0.5, 1.0, 2.0])
    classes = _classes(outputs, ignored)
    loss = nn.CrossEntropyLoss(weight, ignore_index=ignored, label_smoothing=smoothing)
    kept = classes != ignored

    def numerators(z: Tensor) -> Tensor:
        costs = (-z.log_softmax(1)).movedim(1, -1) * weight
        chosen = costs.gather(-1, classes.where(kept, 0).unsqueeze(-1)).squeeze(-1)
        smooth = (1 - smoothing) * chosen + smoothing / CLASSES * costs.sum(-1)
        return (smooth * kept).reshape(len(classes), -1).sum(1)

    return LossCase(loss, classes, numerators, float(weight[classes[kept]].sum()))


def _probabilities(outputs: Tensor) -> LossCase:
    targets = torch.randn_like(outputs).softmax(1)

    def numerators(z: Tensor) -> Tensor:
        return -(targets * z.log_softmax(1)).reshape(len(targets), -1).sum(1)

    return LossCase(nn.CrossEntropyLoss(), targets, numerators, outputs[:, 0].numel())


def _log_cosh(x: Tensor) -> Tensor:
    return x + F.softplus(-2 * x)


def _differences(outputs: Tree, targets: Tree) -> Tensor:
    """All outputs minus all targets, [N, numbers of one sample]."""
    pairs = zip(tree_leaves(outputs), tree_leaves(targets), strict=True)
    return torch.cat([(z - t).flatten(1) for z, t in pairs], 1)


def _callable(loss: Loss) -> Callable[[Tree], LossCase]:
    def case(outputs: Tree) -> LossCase:
        targets = tree_map(torch.randn_like, outputs)

        def numerators(z: Tree) -> Tensor:
            return _log_cosh(_differences(z, targets)).sum(1)

        return LossCase(loss, targets, numerators, len(tree_leaves(outputs)[0]))

    return case


LOSSES: dict[str, Callable[[Tree], LossCase]] = {
    "mse": _mse,
    "mse-sum": _mse_sum,
    "huber": _huber,
    "logistic": _logistic,
    "poisson": _poisson,
    "cross-entropy": _cross_entropy,
    "weighted-cross-entropy": _weighted_cross_entropy,
    "probabilities": _probabilities,
    "per-sample": _callable(lambda z, t: _log_cosh(_differences(z, t)).sum(1)),
    "mean": _callable(lambda z, t: _log_cosh(_differences(z, t)).sum(1).mean()),
}
