"""Who and what is trained on, decides when to stop, and is only reported on.

No speaker, and no clip of noise, is in two parts. The test set has the speakers whose number is
divisible by three, validation those of the others whose number ends in 2 or 7: 32 speakers train,
8 validate and 20 test, of whom 6, 2 and 4 are women. Of the twelve clips of each class of noise,
training has the first six, validation the next two and the test the last four; they were recorded
separately.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.speech.archives import NoiseClips, SpokenDigits

Part = Literal["train", "validation", "test"]
PARTS: tuple[Part, ...] = ("train", "validation", "test")
# From the metadata of AudioMNIST; the other 48 speakers are men.
WOMEN = (12, 26, 28, 36, 43, 47, 52, 56, 57, 58, 59, 60)
SPEAKERS = 60
# For a form that is quickly made; with women in each part.
SMALL_SPEAKERS: dict[Part, tuple[int, ...]] = {
    "train": (1, 4, 5, 8, 26, 43),
    "validation": (7, 47),
    "test": (3, 12),
}
SMALL_REPETITIONS = 2
CLIPS: dict[Part, slice] = {
    "train": slice(0, 6),
    "validation": slice(6, 8),
    "test": slice(8, 12),
}


@dataclass(frozen=True, eq=False)
class Material:
    """What one part is made from.

    Attributes:
        recordings: [U] which spoken digits.
        clips: by the class of noise, [c, samples] each.
    """

    recordings: npt.NDArray[np.int64]
    clips: dict[str, npt.NDArray[np.int16]]


def part_of(speaker: int) -> Part:
    """The part that a speaker is in."""
    if speaker % 3 == 0:
        return "test"
    return "validation" if speaker % 5 == 2 else "train"


def speakers_of(part: Part, small: bool) -> tuple[int, ...]:
    """The speakers of a part, in order."""
    if small:
        return SMALL_SPEAKERS[part]
    return tuple(speaker for speaker in range(1, SPEAKERS + 1) if part_of(speaker) == part)


def material(part: Part, digits: SpokenDigits, noise: NoiseClips, *, small: bool) -> Material:
    """The recordings and clips of a part; the small form has two of the ten repetitions."""
    chosen = np.isin(digits.speaker, speakers_of(part, small))
    if small:
        chosen &= digits.repetition < SMALL_REPETITIONS
    clips = {
        str(category): noise.pcm[noise.category == category][CLIPS[part]]
        for category in np.unique(noise.category)
    }
    return Material(np.flatnonzero(chosen), clips)
