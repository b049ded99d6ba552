"""FACES: an autoencoder of 25×25 patches of the Olivetti faces, rotated and scaled.

The patches of Hinton & Salakhutdinov (2006) are not on a stable address, so they are made here from
the 400 images, after the supporting material of their paper:

- 165,600 patches, 414 of each image, by rotating (-90° to 90°), scaling (1.4 to 1.8), cropping and
  subsampling the 64×64 images;
- of 40 people 25 are trained on (103,500 patches), the next 5 validate (20,700), and the last 10
  are tested on (41,400);
- each pixel has mean zero, and a single factor makes the mean variance of a pixel 1. An error is
  the sum over 625 pixels in these units;
- the net is 625-2000-1000-500-30 and its mirror image, logistic but for a linear code and linear
  outputs.

The weight decay and the chunks of Hessian-Free are those of Martens' demonstration of it, which
splits the patches in the same way.

Not known, and chosen here: angle and scale are uniform and independent; a patch is centred
on the image; it takes every second pixel of the enlarged image, by bilinear interpolation; means
and factor are those of the patches that are trained on. PCA with 30 components then has a test
error of 135, as the original is said to have (not checked against its source). Errors are
comparable with published ones, not equal to them. Sutskever et al. (2013) do not give the units of
their 7.5, the best published training error; they should be these.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import scipy.io
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent.laboratory.models import autoencoder
from krylov_descent.laboratory.problems.problem import (
    Metric,
    PaperSettings,
    Problem,
    PublishedResult,
    Size,
    images_twice,
)
from krylov_descent.laboratory.sources import DataError, locate

NAME = "faces"
TITLE = "FACES (re-created)"
SUMMARY = "Autoencoder of 25×25 patches of faces, rotated and scaled."
FILE = "olivetti/olivettifaces.mat"

PEOPLE, IMAGES_EACH, IMAGE_SIDE = 40, 10, 64
TESTED, VALIDATION = 10, 5
SIDE = 25
PATCHES, SMALL_PATCHES = 414, 8
MOST_DEGREES, SCALES, SUBSAMPLING = 90.0, (1.4, 1.8), 2.0
HIDDEN, CODE = (2000, 1000, 500), 30
SMALL_HIDDEN = (200, 100)
# Of Martens' demonstration of Hessian-Free: its objective is the squared error, without ½.
WEIGHT_DECAY = 1e-5
CHUNKS = 20

SUTSKEVER = "Sutskever et al. 2013, Table 1"
PUBLISHED = (
    PublishedResult(method="NAG (unregularised)", source=SUTSKEVER, train=7.7),
    PublishedResult(method="HF (unregularised)", source=SUTSKEVER, train=7.5),
)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖outputs − targets‖² of each patch [n]."""
    return (outputs - targets).square().sum(1)


def load_faces(
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    validation: int | None = None,
    patches: int | None = None,
) -> Problem:
    """The autoencoder 625-2000-1000-500-30 on patches of faces.

    Args:
        folder: see `sources.data_folder`; the file is downloaded if it is not there.
        seed: of the angles and scales.
        size: "small" for fewer patches and a smaller network.
        validation: how many of the 30 people who are not tested on are held out, 5 by default.
        patches: of each of the 400 images: 414 by default, 8 when small.
    """
    small = size == "small"
    held_out = VALIDATION if validation is None else validation
    if not 0 <= held_out < PEOPLE - TESTED:
        raise ValueError(
            f"`validation` must be 0 or more and below {PEOPLE - TESTED} people, found {held_out}"
        )
    count = (SMALL_PATCHES if small else PATCHES) if patches is None else patches
    if count < 1:
        raise ValueError(f"`patches` must be at least 1, found {count}")
    # All 165,600 take seconds and 400 MB.
    drawn = cut_patches(read_faces(locate(FILE, folder)), count, seed)
    of_a_person = IMAGES_EACH * count
    trained = (PEOPLE - TESTED - held_out) * of_a_person
    mean = drawn[:trained].mean(0)
    drawn -= mean
    drawn /= drawn[:trained].square().mean().sqrt()
    train, kept, test = drawn.split([trained, held_out * of_a_person, TESTED * of_a_person])
    return Problem(
        name=NAME,
        title=TITLE + (", small" if small else "") + (f", {count} of an image" if patches else ""),
        summary=SUMMARY,
        task="autoencoder",
        train=images_twice(train),
        validation=images_twice(kept) if held_out else None,
        test=images_twice(test),
        build=partial(autoencoder, (SIDE * SIDE, *(SMALL_HIDDEN if small else HIDDEN), CODE)),
        loss=squared_error,
        criterion=nn.MSELoss(reduction="sum"),
        metric=Metric("squared error per patch", "", squared_error),
        weight_decay=WEIGHT_DECAY,
        paper=None
        if small or patches
        else PaperSettings(curvature_samples=trained // CHUNKS, published=PUBLISHED),
    )


def cut_patches(images: Tensor, count: int, seed: int) -> Tensor:
    """Patches [images · count, 625], those of an image one after the other.

    Args:
        images: [n, 64, 64].
        count: of each image; fewer patches of a seed are the first of more.
        seed: of angles and scales.
    """
    offsets = SUBSAMPLING * (torch.arange(SIDE) - (SIDE - 1) / 2)
    down, right = torch.meshgrid(offsets, offsets, indexing="ij")
    patches = torch.empty(len(images), count, SIDE * SIDE)
    for number, (image, target) in enumerate(zip(images, patches, strict=True)):
        uniform = np.random.default_rng([seed, number]).random((count, 2))
        angle = torch.from_numpy(math.radians(MOST_DEGREES) * (2 * uniform[:, 0] - 1)).float()
        scale = torch.from_numpy(SCALES[0] + (SCALES[1] - SCALES[0]) * uniform[:, 1]).float()
        cos, sin = (turn(angle)[:, None, None] for turn in (torch.cos, torch.sin))
        # Places in pixels of the image from its middle; grid_sample has the edges at -1 and 1.
        places = torch.stack([cos * right - sin * down, sin * right + cos * down], 3)
        places /= scale[:, None, None, None] * (IMAGE_SIDE - 1) / 2
        every = image.expand(count, 1, IMAGE_SIDE, IMAGE_SIDE)
        target.copy_(F.grid_sample(every, places, align_corners=True).reshape(count, -1))
    return patches.reshape(-1, SIDE * SIDE)


def read_faces(path: Path) -> Tensor:
    """The upright images [400, 64, 64], float32, ten of a person after ten of another.

    Raises:
        DataError: not a MATLAB file, or without `faces` of 4096 rows and 400 columns.
    """
    try:
        faces: npt.NDArray[np.uint8] | None = scipy.io.loadmat(path).get("faces")
    # What SciPy raises on bytes that are no MATLAB file depends on where it stumbles.
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as a MATLAB file ({error}): put olivettifaces.mat in its place."
        ) from error
    wanted = IMAGE_SIDE * IMAGE_SIDE, PEOPLE * IMAGES_EACH
    if faces is None or faces.shape != wanted:
        found = "none" if faces is None else f"shape {faces.shape}"
        raise DataError(
            f"{path} is not the file of the Olivetti faces: `faces` must have shape {wanted}, "
            f"found {found}."
        )
    # A column has an image column by column.
    images = faces.T.reshape(-1, IMAGE_SIDE, IMAGE_SIDE).swapaxes(1, 2)
    return torch.from_numpy(images.astype(np.float32))
