"""Frames of 25 ms, 100 a second, and their short-time spectra.

Utterances lie one after another in one array, as their frames do: `bounds` [U + 1] and `offsets`
[U + 1] say where each begins. A frame never reaches over the end of its utterance.
"""

import numpy as np
import numpy.typing as npt
import scipy.fft

from krylov_descent.laboratory.speech.archives import SAMPLE_RATE

FRAME = SAMPLE_RATE * 25 // 1000
STEP = SAMPLE_RATE * 10 // 1000
FFT_SIZE = 256
BINS = FFT_SIZE // 2 + 1
# The frequency of each bin in Hz.
FREQUENCIES: npt.NDArray[np.float64] = np.arange(BINS, dtype=np.float64) * (SAMPLE_RATE / FFT_SIZE)
# White noise 60 dB below a signal of level 1, so that digital silence has a logarithm. The
# rounding to 16 bits of recordings as quiet as these is louder.
FLOOR = 1e-6

Array = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


def frame_offsets(bounds: Places) -> Places:
    """Where the frames of each utterance begin, [U + 1], from where its samples do, [U + 1]."""
    lengths = np.diff(bounds)
    if (lengths < FRAME).any():
        first = int(np.argmax(lengths < FRAME))
        raise ValueError(
            f"utterance {first} has {lengths[first]} samples, fewer than a frame of {FRAME}"
        )
    return np.concatenate([[0], np.cumsum(1 + (lengths - FRAME) // STEP)])


def frames_of(signal: Array, bounds: Places) -> Array:
    """All frames [N, 200] of utterances of samples [S]."""
    offsets = frame_offsets(bounds)
    place_in_utterance = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    starts = np.repeat(bounds[:-1], np.diff(offsets)) + STEP * place_in_utterance
    frames: Array = np.lib.stride_tricks.sliding_window_view(signal, FRAME)[starts]
    return frames


def power_spectra(frames: Array) -> Array:
    """|DFT|² of Hamming-windowed frames [N, 200] with a floor: [N, 129]."""
    window = np.hamming(FRAME).astype(np.float32)
    spectra = scipy.fft.rfft(frames * window, FFT_SIZE)
    power: Array = np.square(spectra.real) + np.square(spectra.imag)
    return power + np.float32(FLOOR * (window @ window))


def log_energies(frames: Array) -> Array:
    """The logarithm of the energy of frames [N, 200], not windowed: [N, 1]."""
    energies: Array = np.einsum("nt,nt->n", frames, frames) + np.float32(FLOOR * FRAME)
    return np.log(energies)[:, None]
