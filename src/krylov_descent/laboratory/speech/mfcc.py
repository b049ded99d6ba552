"""Mel-frequency cepstral coefficients: the cosine transform of log energies in mel bands.

The bands are those of the Aurora front end: 23 triangles between 64 Hz and 4 kHz. There is no
pre-emphasis: a fixed weight of a band is a constant in its logarithm, and the mean over the
utterance is taken off.
"""

import numpy as np
import numpy.typing as npt
import scipy.fft

from krylov_descent.laboratory.speech.framing import FREQUENCIES, Array

COEFFICIENTS = 13
BANDS = 23
LOWEST = 64.0


def mfcc(power: Array) -> Array:
    """Coefficients c0 to c12 [N, 13] of power spectra [N, 129]."""
    log_energies = np.log(power @ mel_bands().astype(np.float32))
    coefficients: Array = scipy.fft.dct(log_energies, norm="ortho")[:, :COEFFICIENTS]
    return coefficients


def mel_bands() -> npt.NDArray[np.float64]:
    """[129, 23]: triangles that are equally wide in mel and reach to their neighbours' peaks."""
    lowest, highest = _mel(np.array([LOWEST, FREQUENCIES[-1]]))
    edges = np.linspace(lowest, highest, BANDS + 2)
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    mel = _mel(FREQUENCIES)[:, None]
    sides: npt.NDArray[np.float64] = np.minimum(
        (mel - left) / (peak - left), (right - mel) / (right - peak)
    )
    return np.where(sides > 0, sides, 0.0)


def _mel(frequency: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return 2595 * np.log10(1 + frequency / 700)
