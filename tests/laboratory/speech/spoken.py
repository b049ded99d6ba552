"""Speech drawn from HMMs that are known, so that what is found can be compared with what was."""

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.speech.lexicon import DIGITS, STATES, chain
from krylov_descent.laboratory.speech.utterances import Utterances

STAY = 0.6


def state_means(dimension: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """[STATES, dimension], a few standard deviations apart."""
    return 2.0 * np.random.default_rng(seed).standard_normal((STATES, dimension))


def speech(
    count: int, *, dimension: int = 8, noise: float = 1.0, seed: int = 0
) -> tuple[Utterances, npt.NDArray[np.int64]]:
    """Utterances of all digits in turn, and the states [N] they were drawn from.

    Each state lasts 1 + geometric frames; coefficients are Gaussian about the state's mean.
    """
    generator = np.random.default_rng(seed + 1)
    digit = np.arange(count) % DIGITS
    labels, lengths = [], []
    for d in digit:
        word = chain(int(d))
        durations = generator.geometric(1 - STAY, len(word))
        labels.append(np.repeat(word, durations))
        lengths.append(durations.sum())
    states = np.concatenate(labels)
    frames = state_means(dimension)[states]
    frames = frames + noise * generator.standard_normal(frames.shape)
    utterances = Utterances(
        frames=frames.astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        digit=digit.astype(np.int64),
        speaker=np.ones(count, np.int64),
        snr=np.where(np.arange(count) // DIGITS % 2, 10.0, np.inf),
        noise=np.full(count, "clean"),
    )
    return utterances, states
