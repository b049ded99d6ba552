"""Noisy spoken digits: which phone is being said, from nine frames of PLP features.

The paper's Aurora-2 is licensed; this is its open stand-in, spoken digits of AudioMNIST with noise
of ESC-50 and babble. The labels are phones by forced alignment: the 19 that the digits are made of,
and silence, where the paper has 56 English phones.
"""

from functools import partial
from pathlib import Path

import torch
from torch import nn

from krylov_descent.laboratory.models import classifier
from krylov_descent.laboratory.problems.problem import (
    Metric,
    PaperSettings,
    Problem,
    PublishedResult,
    Size,
    Split,
    softmax_cross_entropy,
    wrong_class,
)
from krylov_descent.laboratory.speech.corpus import CorpusPart, load_corpus
from krylov_descent.laboratory.speech.features import INPUTS
from krylov_descent.laboratory.speech.lexicon import PHONES
from krylov_descent.laboratory.speech.splits import speakers_of

NAME = "speech"
TITLE = "Noisy spoken digits"
SUMMARY = "Classification of the phones of spoken digits, clean and in noise down to 0 dB."
SIZES = (INPUTS, 512, 1024, 1536, len(PHONES))
SMALL_SIZES = (INPUTS, 64, 64, len(PHONES))
# The paper tells none; that of MNIST classification.
WEIGHT_DECAY = 1e-5
# HF's chunk is not published either: as many samples as KSD takes, 1/K of the data.
CURVATURE_SAMPLES = 60_000
FRAME_ERROR = Metric("frame error", "%", wrong_class)

VINYALS_POVEY = "Vinyals & Povey 2011, Table 2 (Aurora)"
PAPER = PaperSettings(
    curvature_samples=CURVATURE_SAMPLES,
    published=(
        PublishedResult(method="KSD", source=VINYALS_POVEY, train=0.045, test=0.081, time=0.3),
        PublishedResult(method="HF", source=VINYALS_POVEY, train=0.051, test=0.087, time=1.0),
    ),
)


def load_speech(
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    validation: int | None = None,
) -> Problem:
    """The paper's classifier 352-512-1024-1536 on noisy spoken digits.

    The frames are computed at the first call, which takes minutes, and kept on disk; the inputs
    are memory-mapped.

    Args:
        folder: see `sources.data_folder`; files that are not there are rebuilt from public ones.
        seed: of the noise.
        size: "small" for ten speakers and a smaller network.
        validation: how many of the speakers set aside for it decide when to stop: all 8 by
            default, 2 when small; 0 for no validation.
    """
    small = size == "small"
    held_out = len(speakers_of("validation", small))
    if validation is not None and not 0 <= validation <= held_out:
        raise ValueError(f"`validation` must be 0 to {held_out} speakers, found {validation}")
    corpus = load_corpus(folder, seed=seed, small=small)
    deciding = corpus.validation.of_speakers(held_out if validation is None else validation)
    return Problem(
        name=NAME,
        title=TITLE + (", small" if small else ""),
        summary=SUMMARY,
        task="classification",
        train=_split(corpus.train),
        validation=_split(deciding) if len(deciding.states) else None,
        test=_split(corpus.test),
        build=partial(classifier, SMALL_SIZES if small else SIZES),
        loss=softmax_cross_entropy,
        criterion=nn.CrossEntropyLoss(),
        metric=FRAME_ERROR,
        weight_decay=WEIGHT_DECAY,
        paper=None if small else PAPER,
    )


def _split(part: CorpusPart) -> Split:
    return torch.from_numpy(part.inputs), torch.from_numpy(part.phones)
