"""The two sound archives made from the public recordings: 48 and 44.1 kHz WAV down to 8 kHz.

AudioMNIST (MIT) is 30,000 recordings, of which the first ten repetitions are used. From ESC-50 come
96 clips whose licence is CC0 or CC-BY; `noise_clips.tsv` names each with its author. Nothing of
either is kept in this package.
"""

import csv
import io
import lzma
import struct
import warnings
from collections.abc import Iterable, Sequence
from importlib import resources
from math import gcd
from pathlib import Path

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.download import DataError, download_all

AUDIOMNIST = (
    "https://raw.githubusercontent.com/soerenab/AudioMNIST/"
    "630d7dab4c040882834de6fa21baf9a60372accd/data"
)
ESC50 = (
    "https://raw.githubusercontent.com/karolpiczak/ESC-50/"
    "33c8ce9eb2cf0b1c2f8bcf322eb349b6be34dbb6/audio"
)
DIGIT_RATE, NOISE_RATE, RATE = 48_000, 44_100, 8_000
DIGITS, REPETITIONS = 10, 10
NOISE_LEVEL, NOISE_PEAK = 0.1, 0.99

Waveform = npt.NDArray[np.float64]


def spoken_digits(
    scratch: Path,
    progress: bool,
    *,
    address: str = AUDIOMNIST,
    speakers: Sequence[int] = range(1, 61),
    repetitions: int = REPETITIONS,
) -> dict[str, bytes]:
    """The recordings of AudioMNIST as differences of samples, packed, and their index.

    About 370 MB are downloaded, and packing takes minutes.

    Args:
        scratch: where the public files are downloaded to; those that are there are not again.
        progress: show it.
        address: of the folder with a folder for each speaker.
        speakers: by number.
        repetitions: how many of each digit.

    Raises:
        DataError: a recording cannot be had, is damaged, or has another sampling rate.
    """
    spoken = [(s, d, r) for s in speakers for d in range(DIGITS) for r in range(repetitions)]
    files = [f"{s:02d}/{d}_{s:02d}_{r}.wav" for s, d, r in spoken]
    download_all(
        {scratch / file: f"{address}/{file}" for file in files},
        title="AudioMNIST",
        progress=progress,
    )
    recordings = [_resampled(scratch / file, DIGIT_RATE) * 32768 for file in files]
    pcm = [np.clip(np.round(x), -32768, 32767).astype(np.int16) for x in recordings]
    speaker, digit, repetition = np.array(spoken, np.uint8).T
    return {
        "audiomnist8k_r10.delta_i16le.xz": packed_differences(np.concatenate(pcm)),
        "audiomnist8k_r10_index.npz": _packed_arrays(
            offset=_offsets(pcm), digit=digit, speaker=speaker, rep=repetition
        ),
    }


def noise_clips(
    scratch: Path,
    progress: bool,
    *,
    address: str = ESC50,
    clips: Sequence[tuple[str, str]] | None = None,
) -> dict[str, bytes]:
    """Clips of ESC-50 at one level, packed.

    Args:
        scratch: see `spoken_digits`; 42 MB are downloaded.
        progress: show it.
        address: of the folder with the clips.
        clips: class and file name of each; those of `noise_clips.tsv` by default.

    Raises:
        DataError: a clip cannot be had, is damaged, or has another sampling rate.
    """
    wanted = _listed_clips() if clips is None else clips
    download_all(
        {scratch / file: f"{address}/{file}" for _, file in wanted},
        title="ESC-50",
        progress=progress,
    )
    pcm = []
    for _, file in wanted:
        clip = _resampled(scratch / file, NOISE_RATE)
        clip = clip * (NOISE_LEVEL / np.sqrt(np.mean(clip**2)))
        clip = clip * min(1.0, NOISE_PEAK / np.abs(clip).max())
        pcm.append(np.round(clip * 32767).astype(np.int16))
    return {
        "esc50_noise_8k.npz": _packed_arrays(
            pcm=np.concatenate(pcm),
            offset=_offsets(pcm),
            category=np.array([category for category, _ in wanted]),
            filename=np.array([file for _, file in wanted]),
        )
    }


def packed_differences(pcm: npt.NDArray[np.int16]) -> bytes:
    """Samples as xz of the differences between neighbours, which take less room."""
    differences = np.diff(pcm, prepend=np.int16(0)).astype("<i2")
    return lzma.compress(differences.tobytes(), preset=9 | lzma.PRESET_EXTREME)


def read_wav(path: Path, rate: int) -> Waveform:
    """A mono recording of 16 bits in [-1, 1).

    Raises:
        DataError: it is missing, damaged, empty, or of another form or sampling rate.
    """
    import scipy.io.wavfile

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.io.wavfile.WavFileWarning)  # chunks with comments
        warnings.filterwarnings("error", "Reached EOF", scipy.io.wavfile.WavFileWarning)
        try:
            found, samples = scipy.io.wavfile.read(path)
        except (OSError, ValueError, struct.error, scipy.io.wavfile.WavFileWarning) as error:
            raise DataError(f"{path} cannot be read as a WAV file ({error}).") from error
    if found != rate:
        raise DataError(f"{path} has {found:,} samples a second, but should have {rate:,}.")
    if samples.dtype != np.int16 or samples.ndim != 1 or not samples.any():
        raise DataError(
            f"{path} should be a mono recording of 16 bits that is not silent, found "
            f"{samples.dtype} of shape {samples.shape}."
        )
    waveform: Waveform = samples / 32768
    return waveform


def _resampled(path: Path, rate: int) -> Waveform:
    import scipy.signal

    common = gcd(rate, RATE)
    waveform: Waveform = scipy.signal.resample_poly(
        read_wav(path, rate), RATE // common, rate // common
    )
    return waveform


def _listed_clips() -> list[tuple[str, str]]:
    listing = resources.files(__package__).joinpath("noise_clips.tsv").read_text("utf-8")
    rows = csv.DictReader(io.StringIO(listing), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [(row["category"], row["file"]) for row in rows]


def _offsets(parts: Iterable[npt.NDArray[np.int16]]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)


def _packed_arrays(**arrays: npt.NDArray[np.generic]) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
    return stream.getvalue()
