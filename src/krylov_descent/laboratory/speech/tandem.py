"""The paper's Tandem system: a network's log posteriors as features of Gaussian-mixture HMMs.

Log posteriors of phones lie on curved, correlated clouds, while the mixtures have diagonal
covariances. So they are turned onto their principal axes (the Karhunen-Loève transform of the
training frames), and the axes with hardly any variance are left out. They stand beside the MFCCs as
a second stream with mixtures of its own:

    log p(x | s) = log p(MFCCs | s) + weight · log p(posteriors | s)

In one stream each Gaussian would have to describe both, and a network that has seen the training
speakers is surer of them than of others: a weight below 1 makes up for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from krylov_descent.laboratory.speech.decoding import recognize
from krylov_descent.laboratory.speech.digit_hmm import DigitHmm
from krylov_descent.laboratory.speech.hmm import count_transitions
from krylov_descent.laboratory.speech.lexicon import STATES
from krylov_descent.laboratory.speech.mixtures import GaussianMixtures, grown_mixtures
from krylov_descent.laboratory.speech.utterances import Utterances

# Of the variance of the log posteriors: what the axes that are kept must hold.
VARIANCE_KEPT = 0.99
# Gaussians a state, in either stream.
COMPONENTS = 16
# Those that the validation set chooses from.
WEIGHTS = (0.125, 0.25, 0.5, 1.0)


@dataclass(frozen=True, eq=False)
class PrincipalAxes:
    """The Karhunen-Loève transform x → (x − mean) · axes.

    Attributes:
        mean: [d].
        axes: [d, k], orthonormal columns, from the largest variance to the smallest.
    """

    mean: npt.NDArray[np.float32]
    axes: npt.NDArray[np.float32]

    def __call__(self, frames: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Frames [n, d] in decorrelated coordinates [n, k]."""
        return np.asarray((frames - self.mean) @ self.axes, np.float32)


def principal_axes(frames: npt.NDArray[np.float32], kept: float = VARIANCE_KEPT) -> PrincipalAxes:
    """The fewest axes of frames [n, d] that hold a share `kept` of their variance; O(n·d²).

    Args:
        frames: what the covariance is taken of.
        kept: above 0, at most 1.
    """
    if not 0 < kept <= 1:
        raise ValueError(f"`kept` must be above 0 and at most 1, found {kept}")
    mean = frames.mean(0, dtype=np.float64)
    centred = frames - mean.astype(np.float32)
    variances, axes = np.linalg.eigh((centred.T @ centred).astype(np.float64) / len(frames))
    variances, axes = variances[::-1].clip(0), axes[:, ::-1]
    shares = np.cumsum(variances) / variances.sum()
    count = 1 + int(np.searchsorted(shares, kept - 1e-9))
    return PrincipalAxes(mean.astype(np.float32), axes[:, :count].astype(np.float32))


def beside(
    mfcc: Utterances, log_posteriors: npt.NDArray[np.float32], axes: PrincipalAxes
) -> Utterances:
    """The Tandem features: MFCCs, then the log posteriors [N, phones] on their axes."""
    return mfcc.with_frames(np.concatenate([mfcc.frames, axes(log_posteriors)], 1))


@dataclass(frozen=True, eq=False)
class TwoStreams:
    """Acoustics of Tandem features.

    Attributes:
        mfcc: mixtures of the first coefficients.
        posteriors: mixtures of the others.
        weight: of the second stream.
    """

    mfcc: GaussianMixtures
    posteriors: GaussianMixtures
    weight: float

    def log_likelihoods(
        self, frames: npt.NDArray[np.float32], states: Sequence[int] | None = None
    ) -> Tensor:
        """The weighted sum of both streams of frames [n, d]: [n, states asked for]."""
        border = self.mfcc.means.shape[2]
        first = self.mfcc.log_likelihoods(frames[:, :border], states)
        return first + self.weight * self.posteriors.log_likelihoods(frames[:, border:], states)


def train_on_all_conditions(
    utterances: Utterances,
    labels: npt.NDArray[np.int64],
    *,
    components: int = COMPONENTS,
    device: torch.device | str = "cpu",
) -> DigitHmm:
    """HMMs of noisy speech. Its labels are those of the same speech without noise, and stay.

    Args:
        utterances: of all noise levels, MFCCs.
        labels: [N] states.
        components: Gaussians a state, a power of two.
        device: where densities and paths are computed.
    """
    mixtures = grown_mixtures(utterances.frames, labels, STATES, components, device)
    return DigitHmm(mixtures, count_transitions(labels, utterances.offsets, STATES))


def train_tandem(
    baseline: DigitHmm,
    posteriors: npt.NDArray[np.float32],
    labels: npt.NDArray[np.int64],
    validation: Utterances,
    *,
    components: int = COMPONENTS,
) -> DigitHmm:
    """The HMMs of MFCCs with a second stream, weighted for the fewest errors on other speakers.

    Args:
        baseline: HMMs whose acoustics are mixtures of MFCCs.
        posteriors: [N, k] log posteriors of the training frames on their principal axes.
        labels: [N] states.
        validation: Tandem features of speakers that the network was not trained on.
        components: Gaussians a state of the second stream, a power of two.
    """
    if not isinstance(baseline.acoustics, GaussianMixtures):
        raise TypeError("`baseline` must have Gaussian mixtures of MFCCs as its acoustics")
    device = baseline.acoustics.device
    mixtures = grown_mixtures(posteriors, labels, STATES, components, device)
    candidates = [
        replace(baseline, acoustics=TwoStreams(baseline.acoustics, mixtures, weight))
        for weight in WEIGHTS
    ]
    errors = [(recognize(model, validation) != validation.digit).sum() for model in candidates]
    return candidates[int(np.argmin(errors))]
