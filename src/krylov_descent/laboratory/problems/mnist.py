"""MNIST: the paper's autoencoder and classifier, and the classifier with RBM pretraining.

The paper trains on all 60,000 images and stops on its held-out set. Here the last 5,000 training
images are held out by default to decide when to stop and which settings to take, and the 10,000
test images are only reported on; `validation=0` trains on all 60,000.
"""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from krylov_descent.laboratory.models import autoencoder, classifier
from krylov_descent.laboratory.problems.problem import (
    CLASSIFICATION_ERROR,
    PRETRAINING,
    SQUARED_ERROR,
    PaperSettings,
    Problem,
    PublishedResult,
    Size,
    bernoulli_cross_entropy,
    images_twice,
    softmax_cross_entropy,
)
from krylov_descent.laboratory.problems.tuned_rates import rates_of
from krylov_descent.laboratory.rbm import (
    RbmSettings,
    pretrain_autoencoder,
    pretrain_classifier,
)
from krylov_descent.laboratory.sources import DataError, locate

AUTOENCODER = "mnist-autoencoder"
CLASSIFIER = "mnist-classifier"
PRETRAINED_CLASSIFIER = "mnist-classifier-pretrained"
TITLES = {
    AUTOENCODER: "MNIST autoencoder",
    CLASSIFIER: "MNIST classification",
    PRETRAINED_CLASSIFIER: "MNIST classification, pretrained",
}
SUMMARIES = {
    AUTOENCODER: "Autoencoder of the 28×28 images of handwritten digits.",
    CLASSIFIER: "Classification of handwritten digits from random starting weights.",
    PRETRAINED_CLASSIFIER: "Classification of handwritten digits from weights pretrained as RBMs.",
}

PIXELS = 28 * 28
CLASSES = 10
VALIDATION, SMALL_VALIDATION = 5_000, 500
SMALL_TRAIN, SMALL_TEST = 2_000, 1_000
AUTOENCODER_SIZES = (PIXELS, 1000, 500, 250, 30)
SMALL_AUTOENCODER_SIZES = (PIXELS, 200, 100, 20)
CLASSIFIER_SIZES = (PIXELS, 500, 500, 2000, CLASSES)
SMALL_CLASSIFIER_SIZES = (PIXELS, 100, 100, CLASSES)
WEIGHT_DECAY = 1e-5
CURVATURE_SAMPLES = 7_500

VINYALS_POVEY = "Vinyals & Povey 2011, Table 2"
HINTON_SALAKHUTDINOV = "Hinton & Salakhutdinov 2006"
SUTSKEVER = "Sutskever et al. 2013, Table 1"
PUBLISHED = {
    AUTOENCODER: (
        PublishedResult(method="KSD", source=VINYALS_POVEY, train=1.8, test=2.5, time=0.2),
        PublishedResult(method="HF", source=VINYALS_POVEY, train=1.7, test=2.7, time=1.0),
        PublishedResult(method="pretraining and CG", source=HINTON_SALAKHUTDINOV, test=3.00),
        PublishedResult(method="SGD (unregularised)", source=SUTSKEVER, train=2.1),
        PublishedResult(method="NAG (unregularised)", source=SUTSKEVER, train=0.73),
        PublishedResult(method="HF (unregularised)", source=SUTSKEVER, train=0.69),
    ),
    CLASSIFIER: (
        PublishedResult(method="KSD", source=VINYALS_POVEY, train=0.0, test=0.0170, time=0.6),
        PublishedResult(method="HF", source=VINYALS_POVEY, train=0.0, test=0.0201, time=1.0),
    ),
    PRETRAINED_CLASSIFIER: (
        PublishedResult(method="KSD", source=VINYALS_POVEY, train=0.0, test=0.0129, time=0.6),
        PublishedResult(method="HF", source=VINYALS_POVEY, train=0.0, test=0.0140, time=1.0),
        PublishedResult(method="pretraining and CG", source=HINTON_SALAKHUTDINOV, test=0.012),
    ),
}


@dataclass(frozen=True)
class Mnist:
    """Images in [0, 1], float32 [n, 784], with classes, int64 [n]; each a (images, classes)."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_autoencoder(
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    validation: int | None = None,
) -> Problem:
    """The paper's autoencoder 784-1000-500-250-30; the arguments are those of `read_mnist`."""
    data = read_mnist(folder, seed=seed, size=size, validation=validation)
    small = size == "small"
    sizes = SMALL_AUTOENCODER_SIZES if small else AUTOENCODER_SIZES
    return Problem(
        name=AUTOENCODER,
        title=TITLES[AUTOENCODER] + (", small" if small else ""),
        summary=SUMMARIES[AUTOENCODER],
        task="autoencoder",
        train=images_twice(data.train[0]),
        validation=images_twice(data.validation[0]) if len(data.validation[0]) else None,
        test=images_twice(data.test[0]),
        build=partial(autoencoder, sizes),
        pretrain=partial(pretrain_autoencoder, settings=_rbm_settings(small)),
        loss=bernoulli_cross_entropy,
        criterion=nn.BCEWithLogitsLoss(reduction="sum"),
        metric=SQUARED_ERROR,
        weight_decay=WEIGHT_DECAY,
        rates=rates_of(AUTOENCODER, small),
        paper=None if small else _paper(AUTOENCODER),
    )


def load_classifier(
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    validation: int | None = None,
) -> Problem:
    """The paper's classifier 784-500-500-2000-10 from the sparse initialisation.

    The arguments are those of `read_mnist`.
    """
    data = read_mnist(folder, seed=seed, size=size, validation=validation)
    return _classifier(CLASSIFIER, data, size, initialization="sparse")


def load_pretrained_classifier(
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    validation: int | None = None,
) -> Problem:
    """The same classifier from RBM pretraining; the arguments are those of `read_mnist`."""
    data = read_mnist(folder, seed=seed, size=size, validation=validation)
    return _classifier(PRETRAINED_CLASSIFIER, data, size, initialization=PRETRAINING)


def _classifier(name: str, data: Mnist, size: Size | None, initialization: str) -> Problem:
    small = size == "small"
    sizes = SMALL_CLASSIFIER_SIZES if small else CLASSIFIER_SIZES
    return Problem(
        name=name,
        title=TITLES[name] + (", small" if small else ""),
        summary=SUMMARIES[name],
        task="classification",
        train=data.train,
        validation=data.validation if len(data.validation[0]) else None,
        test=data.test,
        build=partial(classifier, sizes),
        initialization=initialization,
        pretrain=partial(pretrain_classifier, settings=_rbm_settings(small)),
        loss=softmax_cross_entropy,
        criterion=nn.CrossEntropyLoss(),
        metric=CLASSIFICATION_ERROR,
        weight_decay=WEIGHT_DECAY,
        rates=rates_of(name, small),
        paper=None if small else _paper(name),
    )


def read_mnist(
    folder: str | Path | None = None,
    *,
    seed: int = 0,
    size: Size | None = None,
    validation: int | None = None,
) -> Mnist:
    """MNIST in three parts; about 220 MB of memory.

    Args:
        folder: see `sources.data_folder`; files that are not there are downloaded.
        seed: of the images that the small form takes; the full form has no choice to make.
        size: "small" for 2,000 training, 500 validation and 1,000 test images.
        validation: how many of the last training images are held out (5,000 by default).
    """
    small = size == "small"
    held_out = (SMALL_VALIDATION if small else VALIDATION) if validation is None else validation
    images, labels = _read_pair("train", folder)
    if not 0 <= held_out < len(images):
        raise ValueError(
            f"`validation` must be 0 or more and below {len(images):,} images, found {held_out:,}"
        )
    kept = len(images) - held_out
    train, rest = (images[:kept], labels[:kept]), (images[kept:], labels[kept:])
    test = _read_pair("t10k", folder)
    if small:
        # Drawn, because the order of the files means something: the first half of the test set
        # is the easier one.
        generator = np.random.default_rng(seed)
        train = _sample(train, SMALL_TRAIN, generator)
        test = _sample(test, SMALL_TEST, generator)
    return Mnist(train=_tensors(train), validation=_tensors(rest), test=_tensors(test))


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in a gzipped idx file of unsigned bytes.

    The header is two zero bytes, the type (8), the number of dimensions, then each dimension as
    a big-endian 32-bit integer; the elements follow, the last index running fastest.

    Raises:
        DataError: not gzip, not idx, another type, or another length than the header says.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as a gzip file ({error}).") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(
            f"{path} is no idx file of bytes: it begins with {content[:4].hex(' ') or 'nothing'}, "
            "not with 00 00 08."
        )
    dimensions = content[3]
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{path} is damaged: it ends within its header.")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise DataError(
            f"{path} is damaged: its header says {shape}, which makes {expected:,} bytes, but it "
            f"has {len(content):,}."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


_Pair = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]


def _read_pair(part: str, folder: str | Path | None) -> _Pair:
    """Images [n, 28, 28] and labels [n] of "train" or "t10k", as bytes."""
    image_path = locate(f"mnist/{part}-images-idx3-ubyte.gz", folder)
    label_path = locate(f"mnist/{part}-labels-idx1-ubyte.gz", folder)
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise DataError(
            f"{image_path} and {label_path} do not fit: images of shape {images.shape}, labels "
            f"of shape {labels.shape}."
        )
    return images, labels


def _sample(pair: _Pair, count: int, generator: np.random.Generator) -> _Pair:
    images, labels = pair
    chosen = np.sort(generator.choice(len(images), min(count, len(images)), replace=False))
    return images[chosen], labels[chosen]


def _tensors(pair: _Pair) -> tuple[Tensor, Tensor]:
    images, labels = pair
    pixels = torch.from_numpy(images.reshape(-1, PIXELS).astype(np.float32)).div_(255)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def _rbm_settings(small: bool) -> RbmSettings:
    return RbmSettings(epochs=5) if small else RbmSettings()


def _paper(name: str) -> PaperSettings:
    return PaperSettings(curvature_samples=CURVATURE_SAMPLES, published=PUBLISHED[name])
