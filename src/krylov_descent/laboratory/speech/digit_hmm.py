"""A digit recogniser's two halves, acoustics and transitions, and utterances laid out for it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from krylov_descent.laboratory.speech.hmm import Transitions
from krylov_descent.laboratory.speech.utterances import Utterances

# Utterances that are searched at once.
BATCH = 512


class AcousticModel(Protocol):
    """Says how well frames fit states: Gaussian mixtures, or a network's posteriors."""

    def log_likelihoods(
        self, frames: npt.NDArray[np.float32], states: Sequence[int] | None = None
    ) -> Tensor:
        """log p(x | s) of frames [n, d] up to a term without s: [n, states asked for]."""


@dataclass(frozen=True, eq=False)
class DigitHmm:
    """The HMMs of the ten digits, which share the states of the lexicon."""

    acoustics: AcousticModel
    transitions: Transitions


@dataclass(frozen=True, eq=False)
class Batch:
    """Some utterances, of similar length so that little is padded.

    Attributes:
        members: [u] which utterances.
        rows: [n] their frames, one utterance after another.
        lengths: [u].
    """

    members: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @property
    def inside(self) -> npt.NDArray[np.bool_]:
        """[u, T] where a padded array holds a frame."""
        return np.arange(self.lengths.max()) < self.lengths[:, None]

    def pad(self, values: Tensor) -> Tensor:
        """Values of the frames [n, k] as [u, T, k], zero past the ends."""
        inside = torch.from_numpy(self.inside).to(values.device)
        padded = values.new_zeros(*inside.shape, values.shape[1])
        padded[inside] = values
        return padded


def batches(utterances: Utterances, chosen: npt.NDArray[np.bool_] | None = None) -> Iterator[Batch]:
    """The utterances, or those chosen [U], from short to long in batches."""
    members = np.arange(len(utterances)) if chosen is None else np.flatnonzero(chosen)
    members = members[np.argsort(utterances.lengths[members], kind="stable")]
    for start in range(0, len(members), BATCH):
        some = members[start : start + BATCH]
        rows = [np.arange(*utterances.offsets[u : u + 2]) for u in some]
        yield Batch(some, np.concatenate(rows), utterances.lengths[some])
