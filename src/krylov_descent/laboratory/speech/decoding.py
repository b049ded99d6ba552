"""Which digit was said: the word network silence – one digit – silence, searched by Viterbi.

The recordings hold one digit each, so the network is the ten chains side by side and a word error
is a wrong digit. Acoustics are Gaussian mixtures or, in the hybrid, a network's posteriors over its
priors: p(x | s) ∝ p(s | x) / p(s).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from krylov_descent.laboratory.speech.digit_hmm import DigitHmm, batches
from krylov_descent.laboratory.speech.hmm import viterbi
from krylov_descent.laboratory.speech.lexicon import DIGITS, PHONE_OF_STATE, PHONES, STATES, chain
from krylov_descent.laboratory.speech.utterances import Utterances


@dataclass(frozen=True, eq=False)
class Posteriors:
    """Acoustics of the hybrid; its frames are the log posteriors that a network gave to phones.

    The three states of a phone share its posterior: what tells them apart is their order.

    Attributes:
        log_priors: [phones], logarithms of the phones' shares of the training frames.
        device: where the scores are wanted.
    """

    log_priors: Tensor
    device: torch.device | str = "cpu"

    def log_likelihoods(
        self, frames: npt.NDArray[np.float32], states: Sequence[int] | None = None
    ) -> Tensor:
        """Log posteriors [n, phones] less log priors, as [n, states asked for]."""
        chosen = PHONE_OF_STATE[list(range(STATES) if states is None else states)]
        log_posteriors = torch.from_numpy(np.array(frames, np.float32)).to(self.device)
        return (log_posteriors - self.log_priors.to(self.device))[:, torch.from_numpy(chosen)]


def log_priors(phones: npt.NDArray[np.int64]) -> Tensor:
    """[phones] logarithms of their shares among labels [n]; an unseen phone counts half a frame."""
    counts = np.bincount(phones, minlength=len(PHONES)).clip(0.5)
    return torch.from_numpy(np.log(counts / counts.sum())).float()


def recognize(model: DigitHmm, utterances: Utterances) -> npt.NDArray[np.int64]:
    """The digit [U] whose best path is most probable; all ten are equally likely beforehand.

    An utterance too short for every digit would be called a 0.
    """
    digits = np.empty(len(utterances), np.int64)
    words = [chain(digit) for digit in range(DIGITS)]
    for batch in batches(utterances):
        scores = model.acoustics.log_likelihoods(utterances.frames[batch.rows])
        padded, transitions = batch.pad(scores), model.transitions.to(scores.device)
        lengths = torch.from_numpy(batch.lengths).to(scores.device)
        heard = [viterbi(padded[:, :, word], lengths, word, transitions)[0] for word in words]
        digits[batch.members] = torch.stack(heard, 1).argmax(1).cpu().numpy()
    return digits


def errors_by_snr(wrong: npt.NDArray[np.bool_], snr: npt.NDArray[np.float64]) -> dict[float, float]:
    """The share of what is wrong [n] at each signal-to-noise ratio [n], from clean to loud."""
    return {
        float(level): float(wrong[snr == level].mean()) for level in sorted(set(snr), reverse=True)
    }
