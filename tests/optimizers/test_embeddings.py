"""Embeddings whose forward pass writes weights, or whose gradient is none, are refused."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent import KSD, LBFGS, FirstOrder, HessianFree, NonlinearCG
from krylov_descent.optimizers.base import DataOptimizer
from tests.optimizers.nets import parameters_of

METHODS: list[Callable[..., DataOptimizer]] = [
    *(partial(KSD, curvature=kind) for kind in ("gauss-newton", "hessian", "fisher")),
    partial(KSD, preconditioner="identity"),
    HessianFree,
    NonlinearCG,
    LBFGS,
    FirstOrder,
]


def data() -> tuple[Tensor, Tensor]:
    """Words that occur several times."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(9, (30, 4), generator=generator)
    return words, torch.randn(30, 2, generator=generator)


class Words(nn.Module):
    """An embedding, by a module or by a function that returns its rows [m, words, 3]."""

    def __init__(self, embed: Callable[[Any, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(9, 3, **options), nn.Linear(12, 2)
        self.embed = embed

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.embed(self, words)).flatten(1))
        return result


def by_module(model: Words, words: Tensor) -> Tensor:
    rows: Tensor = model.table(words)
    return rows


def by_function(model: Words, words: Tensor, **options: Any) -> Tensor:
    return F.embedding(words, model.table.weight, **options)


def by_data(model: Words, words: Tensor) -> Tensor:
    """Written in a way that torch does not count."""
    model.table.weight.data.clamp_(-0.5, 0.5)
    return by_module(model, words)


def bags(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(9, 3, **options), nn.Tanh(), nn.Linear(3, 2))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "frequencies": (
        lambda: Words(by_module, scale_grad_by_freq=True),
        r"table \(Embedding\) has scale_grad_by_freq=True.* make it with scale_grad_by_freq=False",
    ),
    "frequencies of bags": (
        lambda: bags(scale_grad_by_freq=True, mode="sum"),
        r"0 \(EmbeddingBag\) has scale_grad_by_freq=True",
    ),
    "frequencies by a function": (
        lambda: Words(partial(by_function, scale_grad_by_freq=True)),
        r"call it with scale_grad_by_freq=False",
    ),
    "norms": (
        lambda: Words(by_module, max_norm=0.5),
        r"table \(Embedding\) has max_norm=0.5.* make it with max_norm=None",
    ),
    "norms of bags": (lambda: bags(max_norm=0.5), r"0 \(EmbeddingBag\) has max_norm=0.5"),
    "norms by a function": (
        lambda: Words(partial(by_function, max_norm=0.5)),
        r"writes the parameter table.weight",
    ),
    # Of no row yet, but what is written may be.
    "large norms by a function": (
        lambda: Words(partial(by_function, max_norm=100.0)),
        r"writes the parameter table.weight",
    ),
    "other writes": (lambda: Words(by_data), r"writes the parameter table.weight"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", REFUSED)
def test_they_are_refused_and_nothing_is_written(
    name: str, method: Callable[..., DataOptimizer]
) -> None:
    make, message = REFUSED[name]
    model = make()
    optimizer, before = method(model, nn.MSELoss()), parameters_of(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            optimizer.step(data())
        assert torch.equal(parameters_of(model), before)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}])
def test_others_are_trained(options: dict[str, Any]) -> None:
    model = Words(by_module, **options)
    assert KSD(model, nn.MSELoss()).step(data()).status.moved


def test_a_frozen_embedding_has_no_gradient_to_scale() -> None:
    model = Words(by_module, scale_grad_by_freq=True)
    model.table.weight.requires_grad_(False)
    assert KSD(model, nn.MSELoss()).step(data()).status.moved


def test_parameters_that_are_not_numbers_are_no_write() -> None:
    model = Words(by_module)
    with torch.no_grad():
        model.table.weight[0] = torch.nan
    assert not KSD(model, nn.MSELoss()).step(data()).status.moved
