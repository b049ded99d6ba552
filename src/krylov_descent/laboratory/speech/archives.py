"""The spoken digits and the noise clips as they lie in the data folder: 8 kHz, 16 bits."""

import lzma
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.sources import DataError, locate

SAMPLE_RATE = 8_000
DIGITS_FILE = "audiomnist8k/audiomnist8k_r10.delta_i16le.xz"
DIGITS_INDEX = "audiomnist8k/audiomnist8k_r10_index.npz"
NOISE_FILE = "esc50_noise/esc50_noise_8k.npz"

Samples = npt.NDArray[np.int16]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class SpokenDigits:
    """U recordings of one spoken digit each, one after another.

    Attributes:
        pcm: [S] int16.
        offsets: [U + 1]; recording u is `pcm[offsets[u]:offsets[u + 1]]`.
        digit: [U], 0 to 9.
        speaker: [U], from 1.
        repetition: [U], from 0.
    """

    pcm: Samples
    offsets: Integers
    digit: Integers
    speaker: Integers
    repetition: Integers

    def signal(self, index: int) -> npt.NDArray[np.float32]:
        """One recording at a root mean square of 1: speakers differ in loudness by far."""
        return unit_level(self.pcm[self.offsets[index] : self.offsets[index + 1]])


@dataclass(frozen=True, eq=False)
class NoiseClips:
    """C clips of noise: `pcm` [C, samples] int16 and the class of each, `category` [C]."""

    pcm: Samples
    category: npt.NDArray[np.str_]


def unit_level(samples: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Samples [n] scaled to a root mean square of 1; digital silence stays silent."""
    signal = samples.astype(np.float64)
    level = np.sqrt(np.mean(signal**2)) if len(signal) else 0.0
    return (signal / level if level else signal).astype(np.float32)


def read_digits(folder: str | Path | None = None) -> SpokenDigits:
    """AudioMNIST's first ten repetitions: 6,000 recordings, 60 speakers, 62 MB of memory.

    Args:
        folder: see `sources.data_folder`; what is not there is rebuilt from the public files.

    Raises:
        DataError: the files cannot be had, or are damaged.
    """
    path, index_path = locate(DIGITS_FILE, folder), locate(DIGITS_INDEX, folder)
    index = read_arrays(index_path, "offset", "digit", "speaker", "rep")
    pcm = decode_differences(path)
    offsets, digit, speaker, repetition = (array.astype(np.int64) for array in index.values())
    if offsets.shape != (len(digit) + 1,) or offsets[-1] != len(pcm):
        raise DataError(
            f"{index_path} and {path} do not fit: {len(digit)} recordings that end at sample "
            f"{offsets[-1]:,}, but there are {len(pcm):,} samples."
        )
    return SpokenDigits(pcm, offsets, digit, speaker, repetition)


def read_noise(folder: str | Path | None = None) -> NoiseClips:
    """96 clips of five seconds from ESC-50 in 8 classes.

    Args:
        folder: see `read_digits`.

    Raises:
        DataError: the file cannot be had, or is damaged.
    """
    path = locate(NOISE_FILE, folder)
    arrays = read_arrays(path, "pcm", "offset", "category")
    lengths = np.diff(arrays["offset"])
    if len(lengths) != len(arrays["category"]) or len(set(lengths)) != 1:
        raise DataError(f"{path} is damaged: its clips must be of one length.")
    return NoiseClips(arrays["pcm"].reshape(len(lengths), -1), arrays["category"])


def decode_differences(path: Path) -> Samples:
    """Samples from an xz file of the differences between neighbours, which compress better."""
    try:
        differences = np.frombuffer(lzma.decompress(path.read_bytes()), "<i2")
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise DataError(f"{path} cannot be read as xz of 16-bit samples ({error}).") from error
    # In 16 bits: differences may overflow, and then the sums overflow back.
    return np.cumsum(differences, dtype=np.int16)


def read_arrays(path: Path, *names: str) -> dict[str, npt.NDArray[Any]]:
    """Arrays of an npz file by name, in the order asked for."""
    try:
        with np.load(path) as archive:
            return {name: archive[name] for name in names}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as arrays {', '.join(names)} ({error}).") from error
