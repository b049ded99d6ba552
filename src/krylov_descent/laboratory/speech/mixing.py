"""Speech in noise: the same recording clean and at five signal-to-noise ratios.

The noise is an excerpt of a clip, or babble: other speakers of the same part talking at once.
Every kind of noise is as likely as every other. What is drawn depends on the seed, the recording
and the ratio alone, so the order of work and the number of workers change nothing.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.speech.archives import SpokenDigits, unit_level
from krylov_descent.laboratory.speech.splits import Material
from krylov_descent.laboratory.speech.utterances import CLEAN

# Signal-to-noise ratios in decibels, those of Aurora-2's training set and 0 dB.
LEVELS = (math.inf, 20.0, 15.0, 10.0, 5.0, 0.0)
BABBLE = "babble"
BABBLE_SPEAKERS = 6

Signal = npt.NDArray[np.float32]


def mix(speech: Signal, noise: Signal, snr: float) -> Signal:
    """Speech with noise [n] so loud that its energy is `snr` decibels below the speech's.

    Both energies are sums over the whole utterance, pauses included.
    """
    if len(speech) != len(noise):
        raise ValueError(f"`noise` must have the {len(speech)} samples of `speech`")
    if math.isinf(snr):
        return speech
    energies = [np.sum(np.square(signal, dtype=np.float64)) for signal in (speech, noise)]
    if energies[1] == 0:
        raise ValueError("`noise` is silent: no signal-to-noise ratio can be made with it")
    gain = math.sqrt(energies[0] / energies[1] * 10 ** (-snr / 10))
    return speech + np.float32(gain) * noise


class Mixer:
    """Renders the recordings of one part in noise.

    Args:
        digits: all recordings.
        material: those of the part, with its clips.
        seed: of the noise.
    """

    def __init__(self, digits: SpokenDigits, material: Material, seed: int) -> None:
        self._digits, self._material, self._seed = digits, material, seed
        self._kinds = [*sorted(material.clips), BABBLE]

    def render(self, recording: int, snr: float) -> tuple[Signal, str]:
        """A recording at a ratio of `LEVELS`, and the kind of noise in it."""
        speech = self._digits.signal(recording)
        if math.isinf(snr):
            return speech, CLEAN
        generator = np.random.default_rng([self._seed, recording, LEVELS.index(snr)])
        kind = self._kinds[generator.integers(len(self._kinds))]
        if kind == BABBLE:
            noise = self._babble(recording, len(speech), generator)
        else:
            clips = self._material.clips[kind]
            noise = _excerpt(clips[generator.integers(len(clips))], len(speech), generator)
        return mix(speech, noise, snr), kind

    def _babble(self, recording: int, length: int, generator: np.random.Generator) -> Signal:
        """Others at the same level, each saying a digit over and over from a random place."""
        speakers = self._digits.speaker[self._material.recordings]
        others = np.setdiff1d(speakers, self._digits.speaker[recording])
        if not len(others):
            raise ValueError("babble needs a second speaker in the part")
        babble = np.zeros(length, np.float32)
        for speaker in generator.permutation(others)[:BABBLE_SPEAKERS]:
            said = self._material.recordings[speakers == speaker]
            signal = self._digits.signal(said[generator.integers(len(said))])
            babble += _excerpt(signal, length, generator)
        return babble


def _excerpt(samples: npt.NDArray[Any], length: int, generator: np.random.Generator) -> Signal:
    """`length` samples from a random place on, beginning anew where the end is reached."""
    start = generator.integers(len(samples))
    places = np.arange(start, start + length)
    return unit_level(samples.take(places, mode="wrap"))
