"""Spoken digits and noise that are made here: every phone is a chord of its own."""

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.speech.archives import SAMPLE_RATE, NoiseClips, SpokenDigits
from krylov_descent.laboratory.speech.lexicon import PHONES, PRONUNCIATIONS, SILENCE
from krylov_descent.laboratory.speech.splits import PARTS, SMALL_SPEAKERS

SAMPLES_OF_A_PHONE = 640
CATEGORIES = ("hum", "wind")
SPEAKERS = tuple(sorted(speaker for part in PARTS for speaker in SMALL_SPEAKERS[part]))


def spoken_digits(repetitions: int = 2) -> SpokenDigits:
    """The speakers of the small form, each saying every digit; quiet, as the real ones are."""
    said = [(s, d, r) for s in SPEAKERS for d in range(10) for r in range(repetitions)]
    parts = [_say(d, np.random.default_rng([s, d, r]), 1 + 0.001 * s) for s, d, r in said]
    speaker, digit, repetition = np.array(said, np.int64).T
    return SpokenDigits(
        pcm=np.concatenate(parts),
        offsets=np.cumsum([0, *map(len, parts)]),
        digit=digit,
        speaker=speaker,
        repetition=repetition,
    )


def spoken_phones(digit: int) -> npt.NDArray[np.int64]:
    """The phone at each sample of a digit as it is said here."""
    word = [SILENCE, *PRONUNCIATIONS[digit], SILENCE]
    return np.repeat([PHONES.index(phone) for phone in word], SAMPLES_OF_A_PHONE)


def noise_clips(clips: int = 12, seconds: float = 0.5) -> NoiseClips:
    """Twelve clips of two classes: a hum, and white noise; each differs from the others."""
    generator = np.random.default_rng(0)
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    hums = [np.sin(2 * np.pi * (100 + 10 * i) * time) for i in range(clips)]
    winds = [generator.standard_normal(len(time)) / 3 for _ in range(clips)]
    pcm = np.round(3_000 * np.stack(hums + winds)).astype(np.int16)
    return NoiseClips(pcm, np.repeat(CATEGORIES, clips))


def _say(digit: int, generator: np.random.Generator, pitch: float) -> npt.NDArray[np.int16]:
    phones = spoken_phones(digit)
    time = np.arange(len(phones)) / SAMPLE_RATE
    low, high = 300 + 70 * phones, 3_600 - 130 * phones
    chord = np.sin(2 * np.pi * low * pitch * time) + 0.5 * np.sin(2 * np.pi * high * pitch * time)
    chord[phones == PHONES.index(SILENCE)] = 0
    return np.round(400 * chord + 4 * generator.standard_normal(len(time))).astype(np.int16)
