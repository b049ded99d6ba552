"""Perceptual linear prediction (Hermansky 1990): 13 cepstra of an all-pole model of loudness.

The power spectrum is seen through critical bands, weighted as the ear weights frequencies and
raised to the power 0.33, as loudness grows. An all-pole model of order 12 is fitted to what results
and described by its cepstrum.
"""

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.speech.framing import FREQUENCIES, Array

ORDER = 12
LOUDNESS_EXPONENT = 0.33


def plp(power: Array) -> Array:
    """Cepstra c0 to c12 [N, 13] of power spectra [N, 129]; c0 is the log gain of the model."""
    loudness = (power @ _bands().astype(np.float32)) ** np.float32(LOUDNESS_EXPONENT)
    # The bands around 0 Hz and half the sampling rate lie half outside; their neighbours stand in.
    loudness[:, 0], loudness[:, -1] = loudness[:, 1], loudness[:, -2]
    autocorrelation = np.fft.irfft(loudness)[:, : ORDER + 1]
    prediction, error = levinson(autocorrelation)
    return cepstra(prediction, error).astype(np.float32)


def bark(frequency: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Hertz on the Bark scale (Hermansky's equation 3, without its 2π)."""
    return 6 * np.arcsinh(frequency / 600)


def equal_loudness(frequency: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The ear's sensitivity to power at about 40 dB by Hertz (Hermansky's equation 7)."""
    squared = (2 * np.pi * frequency) ** 2
    return (squared + 56.8e6) * squared**2 / ((squared + 6.3e6) ** 2 * (squared + 0.38e9))


def masking(distance: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """How much of a tone reaches a band so many Bark above it (Hermansky's equation 5).

    25 dB a Bark are lost on the way down and 10 dB on the way up.
    """
    slopes = np.minimum(2.5 * (distance + 0.5), -1.0 * (distance - 0.5))
    return np.where((distance < -1.3) | (distance > 2.5), 0.0, 10 ** np.minimum(slopes, 0.0))


def _bands() -> npt.NDArray[np.float64]:
    """[129, 17]: weights of the bins in bands about one Bark apart, equal loudness included."""
    edge = bark(FREQUENCIES[-1:])[0]
    centres = np.linspace(0, edge, int(np.ceil(edge)) + 1)
    weights = masking(centres - bark(FREQUENCIES)[:, None])
    return weights * equal_loudness(600 * np.sinh(centres / 6))


def levinson(
    autocorrelation: npt.NDArray[np.float64],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Linear prediction from autocorrelations [N, p + 1] by Levinson and Durbin's recursion.

    Returns:
        coefficients [N, p + 1] of A(z) = 1 + a1 z⁻¹ + …, and the prediction error [N].
    """
    prediction = np.zeros_like(autocorrelation)
    prediction[:, 0] = 1
    error = autocorrelation[:, 0].copy()
    for i in range(1, autocorrelation.shape[1]):
        correlation = np.einsum("nk,nk->n", prediction[:, :i], autocorrelation[:, i:0:-1])
        reflection = -correlation / error
        prediction[:, 1 : i + 1] += reflection[:, None] * prediction[:, i - 1 :: -1][:, :i]
        error *= 1 - reflection**2
    return prediction, error


def cepstra(
    prediction: npt.NDArray[np.float64], error: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The cepstrum [N, p + 1] of the power spectrum error / |A|².

    c0 = log error; the others are those of log 1/A(z) = Σ c_n z⁻ⁿ, which differentiated gives
    n c_n = −n a_n − Σ_{k<n} k c_k a_{n−k}.
    """
    found = np.zeros_like(prediction)
    found[:, 0] = np.log(error)
    for n in range(1, prediction.shape[1]):
        earlier = np.arange(1, n) * found[:, 1:n]
        found[:, n] = (
            -prediction[:, n] - np.einsum("nk,nk->n", earlier, prediction[:, n - 1 : 0 : -1]) / n
        )
    return found
