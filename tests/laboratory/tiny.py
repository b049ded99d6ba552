"""A learning problem that trains in milliseconds, and an optimiser that does as it is told."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from krylov_descent.laboratory.models import autoencoder
from krylov_descent.laboratory.problems.problem import (
    SQUARED_ERROR,
    Metric,
    Problem,
    bernoulli_cross_entropy,
    images_twice,
)
from krylov_descent.laboratory.rbm import RbmSettings, pretrain_autoencoder
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.optimizers.result import Status, StepResult


def tiny_problem() -> Problem:
    """An autoencoder 12-6-2 of 40 + 16 + 16 random images."""
    images = torch.rand(72, 12, generator=torch.Generator().manual_seed(3))
    return Problem(
        name="tiny",
        title="Tiny",
        summary="Noise.",
        task="autoencoder",
        train=images_twice(images[:40]),
        validation=images_twice(images[40:56]),
        test=images_twice(images[56:]),
        build=partial(autoencoder, (12, 6, 2)),
        initialization="glorot",
        pretrain=partial(pretrain_autoencoder, settings=RbmSettings(epochs=2)),
        loss=bernoulli_cross_entropy,
        criterion=nn.BCEWithLogitsLoss(reduction="sum"),
        metric=SQUARED_ERROR,
        weight_decay=1e-4,
    )


def one_weight(**_: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 1, bias=False, dtype=torch.float64))


def weight_itself(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.squeeze(1)


def scripted_problem() -> Problem:
    """Its error is its only weight, on training and validation data; on test data twice that."""
    one = torch.ones(1, 1, dtype=torch.float64)
    return replace(
        tiny_problem(),
        train=images_twice(one),
        validation=images_twice(one),
        test=images_twice(2 * one),
        build=one_weight,
        metric=Metric("weight", "", weight_itself),
    )


class Scripted(DataOptimizer):
    """Sets the only weight to one given number after the other; None leaves it as it is.

    `given` is the data of its steps.
    """

    def __init__(self, model: nn.Module, numbers: Sequence[float | None], passes: float) -> None:
        self.numbers, self.passes = numbers, passes
        self.given: list[Any] = []
        super().__init__(
            model,
            nn.MSELoss(),
            None,
            {"lr": 1.0, "weight_decay": 0.0},
            seed=0,
            forward=None,
            micro_batch=None,
            activation_memory=None,
        )

    def step(self, data: Any = None, *, closure: None = None) -> StepResult:  # type: ignore[override]
        self.given.append(data)
        number = self.numbers[self.steps]
        self.param_groups[0]["steps"] = self.steps + 1
        if number is not None:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(number)
        return StepResult(
            loss=1.0,
            loss_before=1.0,
            loss_after=1.0,
            status=Status.NO_DECREASE if number is None else Status.MOVED,
            reason="as told",
            passes=self.passes,
        )
