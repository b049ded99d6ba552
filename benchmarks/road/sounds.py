"""Frames of noisy spoken digits: which phone is being said?"""

from itertools import pairwise

import torch
from torch import nn

from benchmarks.road.pictures import laboratory_problem
from benchmarks.road.problem import Task

WIDTHS = {"cpu": (64, 64), "cuda": (512, 512)}


def speech(kind: str, seed: int) -> Task:
    """The 42,642 frames of the laboratory's small form, on every kind of device."""
    inputs, targets = laboratory_problem("speech", "cpu").train
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise((inputs.shape[1], *WIDTHS[kind])):
        layers += [nn.Linear(before, after), nn.Sigmoid()]
    layers.append(nn.Linear(WIDTHS[kind][-1], 1 + int(targets.max())))
    return Task(nn.Sequential(*layers), nn.CrossEntropyLoss(), inputs, targets)
