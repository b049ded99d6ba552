"""CURVES: an autoencoder of 28×28 images of curves through three random points.

The default is CURVES (re-created), drawn here: the original file is not on a stable address. A
curve is a quadratic through three points, stroked with soft dabs of ink. Ranges, stroke width and
ink were fitted to what is published of the original: the squared error and the cross-entropy of
its mean image, the entropy of its grey pixels, and the test error of PCA with 18 components
(Hinton & Salakhutdinov 2006). Errors on it are comparable with published ones, not equal to them.
"""

from functools import partial
from pathlib import Path

import numpy as np
import scipy.io
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from krylov_descent.laboratory.models import autoencoder
from krylov_descent.laboratory.problems.problem import (
    SQUARED_ERROR,
    PaperSettings,
    Problem,
    PublishedResult,
    Size,
    bernoulli_cross_entropy,
    images_twice,
)
from krylov_descent.laboratory.problems.tuned_rates import rates_of
from krylov_descent.laboratory.rbm import RbmSettings, pretrain_autoencoder
from krylov_descent.laboratory.sources import DataError, locate

NAME = "curves"
TITLE = "CURVES (re-created)"
SUMMARY = "Autoencoder of 28×28 images of smooth curves through three random points."
ORIGINAL_FILE = "curves/digs3pts_1.mat"

SIDE = 28
# Uniform ranges of the three points, in pixels: x of the left, middle and right point, then y.
X_RANGES = ((3.5, 7.8), (8.0, 18.5), (14.5, 22.5))
Y_RANGE = (3.3, 24.3)
# Gaussian dabs at equal steps along the curve: their number, width in pixels, and ink.
DABS = 40
DAB_DEVIATION = 0.78
DAB_INK = 0.41
INVISIBLE = 1e-6
IMAGES_AT_ONCE = 1_000

TRAIN, VALIDATION, TEST = 20_000, 5_000, 10_000
SMALL_TRAIN, SMALL_VALIDATION, SMALL_TEST = 2_000, 500, 1_000
HIDDEN = (400, 200, 100, 50, 25)
SMALL_HIDDEN = (100, 50, 25)
WEIGHT_DECAY = 2e-5

VINYALS_POVEY = "Vinyals & Povey 2011, Table 2"
SUTSKEVER = "Sutskever et al. 2013, Table 1"
PAPER = PaperSettings(
    krylov_dimension=80,
    curvature_samples=5_000,
    initial_damping=45.0,
    published=(
        PublishedResult(method="KSD", source=VINYALS_POVEY, train=0.17, test=0.25, time=0.2),
        PublishedResult(method="HF", source=VINYALS_POVEY, train=0.13, test=0.19, time=1.0),
        PublishedResult(
            method="pretraining and CG", source="Hinton & Salakhutdinov 2006", test=1.44
        ),
        PublishedResult(method="SGD (unregularised)", source=SUTSKEVER, train=0.48),
        PublishedResult(method="NAG (unregularised)", source=SUTSKEVER, train=0.074),
        PublishedResult(method="HF (unregularised)", source=SUTSKEVER, train=0.058),
    ),
)


def load_curves(
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    train: int | None = None,
    validation: int | None = None,
    test: int | None = None,
    code_size: int = 5,
    original: bool = False,
) -> Problem:
    """The paper's autoencoder 784-400-200-100-50-25-5 on CURVES.

    Args:
        folder: where the original file is looked for, see `sources.data_folder`.
        seed: of the curves drawn.
        size: "small" for fewer images and a smaller network.
        train: images to train on: 20,000 by default, 2,000 when small.
        validation: images to decide early stopping with. Re-created: drawn beside the 20,000 of
            the paper (5,000 by default; 500 when small). Original: the last of the 20,000 (2,000
            by default). 0 for none.
        test: images to report on: 10,000 by default, 1,000 when small.
        code_size: units in the code layer: 5 in the paper, 6 in Hinton & Salakhutdinov's.
        original: read `curves/digs3pts_1.mat` instead of drawing.
    """
    small = size == "small"
    default = (SMALL_TRAIN, SMALL_TEST) if small else (TRAIN, TEST)
    for name, count in (("train", train), ("test", test)):
        if count is not None and count < 1:
            raise ValueError(f"`{name}` must be at least 1 image, found {count}")
    if validation is not None and validation < 0:
        raise ValueError(f"`validation` must be 0 or more images, found {validation}")
    if code_size < 1:
        raise ValueError(f"`code_size` must be at least 1 unit, found {code_size}")
    counts = (train or default[0], test or default[1])
    if original:
        known, tested = read_original(locate(ORIGINAL_FILE, folder))
        held_out = len(known) // 10 if validation is None else validation
        if held_out >= len(known):
            raise ValueError(f"`validation` must be below {len(known):,}, found {held_out:,}")
        trained = known[: len(known) - held_out][: counts[0]]
        kept = known[len(known) - held_out :]
        tested = tested[: counts[1]]
    else:
        held_out = SMALL_VALIDATION if small else VALIDATION
        held_out = held_out if validation is None else validation
        trained = draw_curves(counts[0], seed, stream=0)
        kept = draw_curves(held_out, seed, stream=1)
        tested = draw_curves(counts[1], seed, stream=2)
    hidden = SMALL_HIDDEN if small else HIDDEN
    settings = RbmSettings(epochs=5) if small else RbmSettings()
    return Problem(
        name=NAME,
        title=("CURVES" if original else TITLE)
        + (", small" if small else "")
        + (f", {train:,} images" if train else ""),
        summary=SUMMARY,
        task="autoencoder",
        train=images_twice(trained),
        validation=images_twice(kept) if held_out else None,
        test=images_twice(tested),
        build=partial(autoencoder, (SIDE * SIDE, *hidden, code_size)),
        pretrain=partial(pretrain_autoencoder, settings=settings),
        loss=bernoulli_cross_entropy,
        criterion=nn.BCEWithLogitsLoss(reduction="sum"),
        metric=SQUARED_ERROR,
        weight_decay=WEIGHT_DECAY,
        rates=rates_of(NAME, small),
        paper=None if small or train else PAPER,
    )


def draw_curves(count: int, seed: int, stream: int = 0) -> Tensor:
    """Images of CURVES (re-created), float32 in [0, 1], [count, 784].

    Args:
        count: fewer images of the same seed and stream are the first of more.
        seed: the same seed gives the same images.
        stream: independent images of one seed (training, validation, test).
    """
    uniform = np.random.default_rng([seed, stream]).random((count, 6))
    low, high = np.array([*X_RANGES, Y_RANGE, Y_RANGE, Y_RANGE]).T
    points = torch.from_numpy(low + (high - low) * uniform).to(torch.float32)
    images = torch.empty(count, SIDE * SIDE)
    for part, target in zip(
        points.split(IMAGES_AT_ONCE), images.split(IMAGES_AT_ONCE), strict=True
    ):
        target.copy_(_ink(part))
    return images


def _ink(points: Tensor) -> Tensor:
    """Curves through points [n, 6] (x of the three, then y of the three) as images [n, 784]."""
    t = torch.linspace(0, 1, DABS)
    # Lagrange's polynomials: the quadratic passes through the points at t = 0, ½, 1.
    through = torch.stack([(2 * t - 1) * (t - 1), 4 * t * (1 - t), t * (2 * t - 1)])
    # A round Gaussian dab is a product of one along x and one along y, so that the sum over the
    # dabs is a matrix product of the two.
    along_x = _profiles(points[:, :3] @ through)
    along_y = _profiles(points[:, 3:] @ through)
    density = DAB_INK * (along_y.transpose(1, 2) @ along_x)
    # Ink on ink darkens ever less and never beyond black.
    ink = -torch.expm1(-density)
    # The tails of the dabs reach subnormal numbers, with which some processors are very slow.
    return F.threshold(ink, INVISIBLE, 0.0).reshape(len(points), SIDE * SIDE)


def _profiles(centres: Tensor) -> Tensor:
    """Gaussian bumps around centres [n, dabs], seen at the pixels: [n, dabs, 28]."""
    pixels = torch.arange(SIDE, dtype=centres.dtype)
    return torch.exp(-0.5 * ((pixels - centres.unsqueeze(-1)) / DAB_DEVIATION).square())


def read_original(path: Path) -> tuple[Tensor, Tensor]:
    """Training and test images of the original CURVES file, float32, [n, 784] each.

    Raises:
        DataError: not a MATLAB file, or without `bdata` and `bdatatest` of 784 columns in [0, 1].
    """
    try:
        variables = scipy.io.loadmat(path, variable_names=["bdata", "bdatatest"])
    # What SciPy raises on bytes that are no MATLAB file depends on where it stumbles.
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as a MATLAB file ({error}): put the original "
            "digs3pts_1.mat in its place."
        ) from error
    return _matrix(variables, "bdata", path), _matrix(variables, "bdatatest", path)


def _matrix(variables: dict[str, np.ndarray], name: str, path: Path) -> Tensor:
    array = variables.get(name)
    if (
        array is None
        or array.ndim != 2
        or array.shape[1] != SIDE * SIDE
        or not len(array)
        or not (array.min() >= 0 and array.max() <= 1)
    ):
        found = "none" if array is None else f"shape {array.shape}"
        raise DataError(
            f"{path} is not the CURVES file: `{name}` must be rows of 784 pixels in [0, 1], "
            f"found {found}."
        )
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
