"""Autoencoders, classifiers of digits, and a picture as a function of the place."""

from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.environment import UnavailableError
from benchmarks.road.problem import Task
from krylov_descent.laboratory.problems import load_problem
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.sources import DataError

# On a CPU the small form of the laboratory's problems.
FORMS: dict[str, dict[str, Any]] = {"cpu": {"size": "small"}, "cuda": {}}
DIGITS = {"cpu": 2000, "cuda": 10000}
STRIDE = {"cpu": 8, "cuda": 4}  # between the pixels that are taken of the picture
FREQUENCY = 30.0  # of SIREN's first layer


@cache
def laboratory_problem(name: str, kind: str) -> Problem:
    """A problem of the laboratory in the form for a kind of device."""
    try:
        return load_problem(name, **FORMS[kind])
    except DataError as reason:
        raise UnavailableError(str(reason)) from reason


def from_laboratory(name: str, kind: str, seed: int) -> Task:
    """Training set, network and start of a problem of the laboratory."""
    problem = laboratory_problem(name, kind)
    model = problem.make_model(seed, None, torch.device("cpu"))
    return Task(model, problem.criterion, *problem.train, problem.loss)


def convolutional(kind: str, seed: int) -> Task:
    """Digits by convolutions with GroupNorm and a mean over places."""
    inputs, targets = laboratory_problem("mnist-classifier", "cuda").train
    count, width = DIGITS[kind], 12 if kind == "cpu" else 32
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise((1, width, 2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(4, after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    images = inputs[:count].reshape(-1, 1, 28, 28)
    return Task(nn.Sequential(*layers), nn.CrossEntropyLoss(), images, targets[:count])


class Sine(nn.Module):
    """The activation of SIREN."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def picture(kind: str, seed: int) -> Task:
    """A photograph in grey that comes with matplotlib, by SIREN (Sitzmann et al., 2020)."""
    places, greys = _photograph(STRIDE[kind])
    torch.manual_seed(seed)
    width, layers = 64, list[nn.Module]()
    for number, (before, after) in enumerate(pairwise((2, width, width, width, 1))):
        layer = nn.Linear(before, after)
        bound = FREQUENCY / before if number == 0 else (6 / before) ** 0.5
        nn.init.uniform_(layer.weight, -bound, bound)
        layers += [layer, Sine()]
    return Task(nn.Sequential(*layers[:-1]), nn.MSELoss(), places, greys)


@cache
def _photograph(stride: int) -> tuple[Tensor, Tensor]:
    import matplotlib as mpl
    from matplotlib.image import imread

    pixels = imread(Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    grey = torch.from_numpy(np.asarray(pixels, dtype=np.float32)).mean(2)[::stride, ::stride]
    axes = [torch.linspace(-1, 1, size) for size in grey.shape]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    return places, (grey / 127.5 - 1).reshape(-1, 1)


curves = partial(from_laboratory, "curves")
mnist_autoencoder = partial(from_laboratory, "mnist-autoencoder")
mnist_classifier = partial(from_laboratory, "mnist-classifier")
addition = partial(from_laboratory, "addition")
memorization = partial(from_laboratory, "memorization-5")
