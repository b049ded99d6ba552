"""Images for benchmarks that need the shape of a problem and not its meaning."""

from dataclasses import replace
from functools import lru_cache, partial

import torch

from krylov_descent.laboratory.models import autoencoder
from krylov_descent.laboratory.problems import load_problem
from krylov_descent.laboratory.problems.mnist import AUTOENCODER_SIZES
from krylov_descent.laboratory.problems.problem import Problem, images_twice
from krylov_descent.laboratory.sources import data_folder

DRAWN, REAL = "drawn curves in place of the digits", "the problem's own images"


@lru_cache(maxsize=1)
def autoencoder_problem(name: str, samples: int, device: torch.device) -> tuple[Problem, str]:
    """A problem with the first `samples` training images, and which images these are.

    Where MNIST is not on the disk, its autoencoder gets drawn images: a benchmark fetches
    nothing, and a step on them costs the same.
    """
    if name == "curves":
        problem = load_problem(name, train=samples, validation=0, test=1)
        return problem.to(device), REAL
    if (data_folder() / "mnist").exists():
        problem = load_problem(name, validation=0).to(device)
        return replace(problem, train=images_twice(problem.train[0][:samples])), REAL
    drawn = load_problem("curves", train=samples, validation=0, test=1).to(device)
    return replace(drawn, name=name, build=partial(autoencoder, AUTOENCODER_SIZES)), DRAWN
