"""Every torch loss of the contract, with outputs and targets that suit it."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

N, C, T = 6, 3, 4


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1


def signs(*shape: int) -> Tensor:
    return torch.randint(2, shape).double() * 2 - 1


def classes(*shape: int) -> Tensor:
    return torch.randint(C, shape)


# How the loss is made, its outputs, its targets.
Makers = tuple[Callable[..., nn.Module], Callable[[], Tensor], Callable[[], Tensor]]
WEIGHT = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64)
BY_NAME: dict[str, Makers] = {
    "MSE": (nn.MSELoss, lambda: normal(N, C), lambda: normal(N, C)),
    "MSE, images": (nn.MSELoss, lambda: normal(N, 2, 3, 3), lambda: normal(N, 2, 3, 3)),
    "MSE, numbers": (nn.MSELoss, lambda: normal(N), lambda: normal(N)),
    "L1": (nn.L1Loss, lambda: normal(N, C), lambda: normal(N, C)),
    "SmoothL1": (partial(nn.SmoothL1Loss, beta=0.5), lambda: normal(N, C), lambda: normal(N, C)),
    "Huber": (partial(nn.HuberLoss, delta=0.5), lambda: normal(N, C), lambda: normal(N, C)),
    "BCE": (nn.BCELoss, lambda: uniform(N, C), lambda: uniform(N, C)),
    "BCE, weights": (partial(nn.BCELoss, WEIGHT), lambda: uniform(N, C), lambda: uniform(N, C)),
    "BCE, one row of weights": (
        partial(nn.BCELoss, WEIGHT.unsqueeze(0)),
        lambda: uniform(N, C),
        lambda: uniform(N, C),
    ),
    "logistic": (nn.BCEWithLogitsLoss, lambda: normal(N, C), lambda: uniform(N, C)),
    "logistic, weights": (
        partial(nn.BCEWithLogitsLoss, WEIGHT, pos_weight=WEIGHT.flip(0)),
        lambda: normal(N, C),
        lambda: uniform(N, C),
    ),
    "KL": (
        nn.KLDivLoss,
        lambda: normal(N, C).log_softmax(1),
        lambda: normal(N, C).softmax(1),
    ),
    "KL, logarithms": (
        partial(nn.KLDivLoss, log_target=True),
        lambda: normal(N, C).log_softmax(1),
        lambda: normal(N, C).log_softmax(1),
    ),
    "Poisson": (nn.PoissonNLLLoss, lambda: normal(N, C), lambda: classes(N, C).double()),
    "Poisson, full": (
        partial(nn.PoissonNLLLoss, log_input=False, full=True),
        lambda: uniform(N, C),
        lambda: classes(N, C).double(),
    ),
    "soft margin": (nn.SoftMarginLoss, lambda: normal(N, C), lambda: signs(N, C)),
    "hinge": (nn.HingeEmbeddingLoss, lambda: normal(N, C), lambda: signs(N, C)),
    "many labels, soft": (
        partial(nn.MultiLabelSoftMarginLoss, WEIGHT),
        lambda: normal(N, C),
        lambda: signs(N, C).relu(),
    ),
    "many classes": (
        partial(nn.MultiMarginLoss, weight=WEIGHT),
        lambda: normal(N, C),
        lambda: classes(N),
    ),
    "many labels": (
        nn.MultiLabelMarginLoss,
        lambda: normal(N, C),
        lambda: torch.tensor([[0, -1, 0], [1, 2, -1]]).repeat(N // 2, 1),
    ),
    "cross-entropy": (nn.CrossEntropyLoss, lambda: normal(N, C), lambda: classes(N)),
    "cross-entropy, weights": (
        partial(nn.CrossEntropyLoss, WEIGHT),
        lambda: normal(N, C),
        lambda: classes(N),
    ),
    "cross-entropy, ignored": (
        partial(nn.CrossEntropyLoss, ignore_index=1),
        lambda: normal(N, C),
        lambda: torch.tensor([0, 1, 2, 1, 0, 2]),
    ),
    "cross-entropy, ignored by default": (
        nn.CrossEntropyLoss,
        lambda: normal(N, C),
        lambda: torch.tensor([0, -100, 2, 1, -100, 2]),
    ),
    "cross-entropy, smoothed": (
        partial(nn.CrossEntropyLoss, label_smoothing=0.3),
        lambda: normal(N, C),
        lambda: classes(N),
    ),
    "cross-entropy, everything": (
        partial(nn.CrossEntropyLoss, WEIGHT, ignore_index=-1, label_smoothing=0.3),
        lambda: normal(N, C),
        lambda: torch.tensor([0, -1, 2, 1, 1, 2]),
    ),
    "cross-entropy, probabilities": (
        nn.CrossEntropyLoss,
        lambda: normal(N, C),
        lambda: normal(N, C).softmax(1),
    ),
    "cross-entropy, weighted probabilities": (
        partial(nn.CrossEntropyLoss, WEIGHT, label_smoothing=0.2),
        lambda: normal(N, C, T),
        lambda: normal(N, C, T).softmax(1),
    ),
    "cross-entropy, sequences": (
        partial(nn.CrossEntropyLoss, WEIGHT, ignore_index=0),
        lambda: normal(N, C, T),
        lambda: torch.arange(N * T).reshape(N, T) % C,
    ),
    "NLL": (nn.NLLLoss, lambda: normal(N, C).log_softmax(1), lambda: classes(N)),
    "NLL, sequences": (
        partial(nn.NLLLoss, WEIGHT, ignore_index=2),
        lambda: normal(N, C, T).log_softmax(1),
        lambda: torch.arange(N * T).reshape(N, T) % C,
    ),
}
