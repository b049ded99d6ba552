"""What a problem is: data, network, loss, metric, and what has been published about it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.initialization import INITIALIZATIONS, initialize
from krylov_descent.laboratory.physics.equation import on_device
from krylov_descent.laboratory.problems.tuned_rates import TunedRate
from krylov_descent.laboratory.rbm import Report
from krylov_descent.objective.term import Term

# (inputs [n, …], targets [n, …]); an autoencoder's are one tensor twice.
Split = tuple[Tensor, Tensor]
# (outputs, targets) -> one number per sample [n]
PerSample = Callable[[Tensor, Tensor], Tensor]
# (model, seed): sets the starting weights
Start = Callable[[nn.Module, int], None]
# (number of the step) -> the samples that it is given
Fresh = Callable[[int], Split]
Size = Literal["small"]
PRETRAINING = "rbm"


@dataclass(frozen=True)
class Metric:
    """What is reported: the mean of `per_sample` over a split, or its root.

    `unit` is "" for a plain number and "%" for a fraction that is shown in per cent.
    """

    name: str
    unit: Literal["", "%"]
    per_sample: PerSample
    root: bool = False

    def of_mean(self, mean: float) -> float:
        """What is reported, given the mean of `per_sample`."""
        return math.sqrt(mean) if self.root else mean

    def text(self, value: float) -> str:
        """The value as a table shows it: 0.25, or 1.70% for 0.017."""
        if math.isnan(value):
            return "NaN"
        return f"{100 * value:.2f}%" if self.unit == "%" else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class PublishedResult:
    """One published row, in the problem's metric; per cents are fractions here.

    `time` is relative to HF. `test` of Vinyals & Povey is the error on the held-out set that,
    as far as the paper tells, also decided when to stop.
    """

    method: str
    source: str
    train: float | None = None
    test: float | None = None
    time: float | None = None


@dataclass(frozen=True, kw_only=True)
class PaperSettings:
    """The settings of Vinyals & Povey 2011, Section 5, and of Martens' HF on the problem.

    `krylov_dimension` is None where Vinyals & Povey did not train the problem. `curvature_samples`
    is the chunk that HF cycles through; `initial_damping` is its λ0, None where none is published.
    """

    krylov_dimension: int | None = 20
    bfgs_iterations: int = 30
    curvature: str = "gauss-newton"
    curvature_samples: int
    initial_damping: float | None = None
    published: tuple[PublishedResult, ...] = ()

    def row(self, method: str) -> PublishedResult:
        """The paper's own row for "KSD" or "HF"."""
        for result in self.published:
            if result.method == method:
                return result
        raise unknown_name("published method", method, (row.method for row in self.published))


class Pretraining(Protocol):
    """Sets a model's weights from the training inputs; see `krylov_descent.laboratory.rbm`."""

    def __call__(
        self, model: nn.Sequential, data: Tensor, seed: int, *, report: Report | None
    ) -> None:
        """Change the model in place."""


class Build(Protocol):
    """Makes the problem's network; the weights it starts with do not matter."""

    def __call__(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Sequential:
        """The network on a device in a precision."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """A learning problem, complete.

    Attributes:
        name: what the command line calls it.
        title: what tables call it.
        summary: one sentence.
        task: "autoencoder" (targets are the inputs), "classification" (targets are classes),
            "regression" (targets are numbers) or "equation" (targets are its solution).
        train: what is trained on; with `fresh` or `terms`, what the training error is measured on.
        validation: what decides early stopping and settings, or None when nothing is held out.
        test: what is only reported.
        fresh: new samples for each step, where they can be drawn at will; else all get `train`.
        build: makes the network.
        initialization: the default starting weights.
        starts: initialisations of the problem's own, by name.
        pretrain: how the initialisation "rbm" is done, None where there is none.
        loss: (outputs, targets) to one number per sample.
        criterion: the same loss as torch's own module, whose curvature has a closed form; the
            mean of `loss` over samples is the objective (summed over the elements of a sample).
        metric: what is reported.
        terms: makes the terms of an equation, which have points of their own and are trained in
            place of `criterion`; else None.
        weight_decay: λ of the objective mean(loss) + ½λ‖θ‖², biases included.
        suited: settings for an optimiser on this problem, by the name of the contender.
        rates: that first-order methods were tuned to, by the name of the contender.
        paper: settings and numbers of the paper; None for small forms, which no paper reports.
    """

    name: str
    title: str
    summary: str
    task: Literal["autoencoder", "classification", "regression", "equation"]
    train: Split
    validation: Split | None
    test: Split
    fresh: Fresh | None = None
    build: Build
    initialization: str = "sparse"
    starts: Mapping[str, Start] = field(default_factory=dict)
    pretrain: Pretraining | None = None
    loss: PerSample
    criterion: nn.Module
    metric: Metric
    terms: Callable[[], dict[str, Term]] | None = None
    weight_decay: float
    suited: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rates: Mapping[str, TunedRate] = field(default_factory=dict)
    paper: PaperSettings | None = None

    @property
    def initializations(self) -> list[str]:
        """The names that `make_model` takes."""
        return [*INITIALIZATIONS, *self.starts, *([PRETRAINING] if self.pretrain else [])]

    def make_model(
        self,
        seed: int = 0,
        initialization: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        report: Report | None = None,
    ) -> nn.Sequential:
        """A network with its starting weights; the global random state stays as it is.

        Args:
            seed: the same seed gives the same weights (with "rbm": on the same device).
            initialization: "sparse", "glorot", "torch" or one of the problem's own, such as "rbm",
                which trains on the training inputs and takes a while; its default if left out.
            device: where it lives, and where pretraining runs.
            dtype: of the parameters.
            report: called after each epoch of pretraining.
        """
        name = initialization or self.initialization
        if name not in self.initializations:
            raise unknown_name("initialisation", name, self.initializations)
        # nn.Linear draws weights from the global generator, which are overwritten below.
        with torch.random.fork_rng(devices=[]):
            model = self.build(device="cpu", dtype=dtype)
        model = model.to(device)
        if name == PRETRAINING and self.pretrain is not None:
            self.pretrain(model, self.train[0].to(device, dtype), seed, report=report)
        elif name in self.starts:
            self.starts[name](model, seed)
        else:
            initialize(model, name, seed)
        return model

    @property
    def objective(self) -> nn.Module | dict[str, Term]:
        """What an optimiser minimises: the loss, or terms of its own."""
        return self.criterion if self.terms is None else self.terms()

    def samples(self, step: int) -> Split:
        """What a step is given, counted from 0, unless terms have it."""
        return self.train if self.fresh is None else self.fresh(step)

    def part(self, number: int, count: int) -> "Problem":
        """The problem with one of `count` parts of each split, which follow one another."""
        return self._with_splits(lambda split: _part(split, number, count))

    def to(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> "Problem":
        """The problem with its splits on a device and in a precision; classes stay integers.

        Raises:
            ValueError: it has terms, and they are in another precision.
        """
        terms = self.terms
        moved = self._with_splits(lambda split: _move(split, device, dtype))
        if terms is None:
            return moved
        if dtype != self.train[0].dtype:
            raise ValueError(
                f"`dtype`: {self.name} is trained in {self.train[0].dtype}, found {dtype}: leave "
                "it out"
            )
        return replace(moved, terms=lambda: on_device(terms(), device))

    def _with_splits(self, change: Callable[[Split], Split]) -> "Problem":
        fresh = self.fresh
        return replace(
            self,
            train=change(self.train),
            validation=None if self.validation is None else change(self.validation),
            test=change(self.test),
            fresh=None if fresh is None else lambda step: change(fresh(step)),
        )


def bernoulli_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of logits against targets in [0, 1], [n, d] both: summed over d, in nats [n]."""
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").sum(1)


def softmax_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of logits [n, classes] against classes [n], in nats [n]."""
    return F.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖logistic(outputs) − targets‖² per sample [n], without ½, as the paper reports it."""
    return (torch.sigmoid(outputs) - targets).square().sum(1)


def wrong_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the logits [n, classes] is not the target's, else 0 [n]."""
    return (outputs.argmax(1) != targets).to(outputs.dtype)


SQUARED_ERROR = Metric("squared error per image", "", squared_error)
CLASSIFICATION_ERROR = Metric("classification error", "%", wrong_class)


def images_twice(images: Tensor) -> Split:
    """The split of an autoencoder: the inputs are the targets, and are held once."""
    return images, images


def _part(split: Split, number: int, count: int) -> Split:
    inputs, targets = split
    size = len(inputs)
    own = slice(size * number // count, size * (number + 1) // count)
    if targets is inputs:
        return images_twice(inputs[own])
    return inputs[own], targets[own]


def _move(split: Split, device: torch.device | str, dtype: torch.dtype) -> Split:
    inputs, targets = split
    moved = inputs.to(device, dtype)
    if targets is inputs:
        return images_twice(moved)
    return moved, targets.to(device, dtype if targets.is_floating_point() else None)
