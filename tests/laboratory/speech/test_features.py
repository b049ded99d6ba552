"""Features against their definitions, computed the slow way in float64."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import scipy.linalg

from krylov_descent.laboratory.speech.dynamics import (
    deltas,
    neighbours,
    normalized,
    with_context,
)
from krylov_descent.laboratory.speech.features import INPUTS, MIDDLE, extract
from krylov_descent.laboratory.speech.framing import (
    FLOOR,
    FREQUENCIES,
    frame_offsets,
    frames_of,
    log_energies,
    power_spectra,
)
from krylov_descent.laboratory.speech.mfcc import mel_bands, mfcc
from krylov_descent.laboratory.speech.plp import (
    bark,
    cepstra,
    equal_loudness,
    levinson,
    masking,
    plp,
)

Array = npt.NDArray[np.float32]


def signal(samples: int, seed: int = 0) -> Array:
    """Coloured noise of level 1, louder and quieter."""
    white = np.random.default_rng(seed).standard_normal(samples)
    coloured = np.convolve(white, [1, 0.8, 0.3, -0.2], "same") * (1.2 + np.sin(np.arange(samples)))
    level: float = coloured.std()
    return np.asarray(coloured / level, np.float32)


def spectra(frames: int = 6) -> Array:
    bounds = np.array([0, 200 + 80 * (frames - 1)])
    return power_spectra(frames_of(signal(int(bounds[1])), bounds))


def test_frames_stay_within_their_utterance() -> None:
    bounds = np.array([0, 200, 479, 760])  # 1, 1 (279 samples) and 2 frames
    samples = np.arange(760, dtype=np.float32)
    assert frame_offsets(bounds).tolist() == [0, 1, 2, 4]
    frames = frames_of(samples, bounds)
    assert frames.shape == (4, 200)
    assert frames[:, 0].tolist() == [0, 200, 479, 559]
    np.testing.assert_array_equal(frames[3], np.arange(559, 759))
    with pytest.raises(ValueError, match="utterance 1 has 199 samples"):
        frame_offsets(np.array([0, 200, 399]))


def test_spectra_are_the_transform_by_its_definition() -> None:
    frames = signal(400).reshape(2, 200)
    n, k = np.arange(200), np.arange(129)
    window = 0.54 - 0.46 * np.cos(2 * np.pi * n / 199)
    transform = (frames * window) @ np.exp(-2j * np.pi * np.outer(n, k) / 256)
    expected = np.abs(transform) ** 2 + FLOOR * np.sum(window**2)
    np.testing.assert_allclose(power_spectra(frames), expected, rtol=1e-3, atol=1e-4)
    assert FREQUENCIES[[0, 32, 128]].tolist() == [0, 1000, 4000]


def test_silence_has_finite_features() -> None:
    silent = extract([np.zeros(1_000, np.float32), signal(1_000)])
    for array in (silent.plp, silent.mfcc, silent.log_energy):
        assert np.isfinite(array).all()
    assert not silent.plp[: silent.offsets[1]].any()


def test_log_energy_is_of_the_frame_as_it_is() -> None:
    frames = np.full((1, 200), 2, np.float32)
    assert log_energies(frames).item() == pytest.approx(math.log(800))


def test_bark_equal_loudness_and_masking_have_their_known_values() -> None:
    # Hermansky writes asinh as a logarithm.
    x = 1_000 / 600
    assert bark(np.array([1_000.0]))[0] == pytest.approx(6 * math.log(x + math.sqrt(x * x + 1)))
    # The ear is most sensitive between 1 and 4 kHz, little below, and the curve is continuous.
    weights = equal_loudness(np.array([0.0, 100.0, 1_000.0, 3_000.0]))
    assert weights[0] == 0
    assert (np.diff(weights) > 0).all()
    distances = np.array([-1.31, -1.3, -0.9, -0.5, 0, 0.5, 1.5, 2.5, 2.51])
    expected = [0, 10**-2, 10**-1, 1, 1, 1, 10**-1, 10**-2, 0]
    np.testing.assert_allclose(masking(distances), expected, atol=1e-12)


def test_linear_prediction_solves_the_normal_equations() -> None:
    r = np.fft.irfft(spectra().astype(np.float64))[:, :13]
    prediction, error = levinson(r)
    for row, a, e in zip(r, prediction, error, strict=True):
        solution = scipy.linalg.solve_toeplitz(row[:-1], -row[1:])
        np.testing.assert_allclose(a[1:], solution, rtol=1e-6, atol=1e-9)
        assert e == pytest.approx(row @ a)


def test_cepstra_are_those_of_the_models_spectrum() -> None:
    r = np.fft.irfft(spectra().astype(np.float64))[:, :13]
    prediction, error = levinson(r)
    log_model = np.log(error[:, None] / np.abs(np.fft.rfft(prediction, 4096)) ** 2)
    expected = np.fft.irfft(log_model)[:, :13]
    np.testing.assert_allclose(cepstra(prediction, error), expected, atol=1e-9)


def slow_plp(power: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """One frame, step by step as Hermansky's paper has them, with dense algebra."""
    top = 6 * math.asinh(4_000 / 600)
    loudness = []
    for centre in np.linspace(0, top, 17):
        energy = 0.0
        for k, p in enumerate(power):
            above = centre - 6 * math.asinh(k * 31.25 / 600)
            if -1.3 <= above <= 2.5:
                energy += p * 10 ** min(0, 2.5 * (above + 0.5), 0.5 - above)
        w2 = (2 * math.pi * 600 * math.sinh(centre / 6)) ** 2
        ear = (w2 + 56.8e6) * w2**2 / ((w2 + 6.3e6) ** 2 * (w2 + 0.38e9))
        loudness.append((ear * energy) ** 0.33)
    loudness[0], loudness[-1] = loudness[1], loudness[-2]
    full = [*loudness, *loudness[-2:0:-1]]
    r = np.fft.fft(full).real[:13] / 32
    a = scipy.linalg.solve(scipy.linalg.toeplitz(r[:-1]), -r[1:])
    polynomial = np.concatenate([[1], a])
    cepstrum = np.fft.irfft(-np.log(np.abs(np.fft.rfft(polynomial, 8192)) ** 2))[:13]
    return np.concatenate([[math.log(r @ polynomial)], cepstrum[1:]])


def test_plp_is_hermanskys() -> None:
    power = spectra()
    expected = np.stack([slow_plp(row) for row in power.astype(np.float64)])
    np.testing.assert_allclose(plp(power), expected, atol=1e-4)


def test_mel_bands_share_each_frequency_between_two_neighbours() -> None:
    bands = mel_bands()
    assert bands.shape == (129, 23)
    sums = bands.sum(1)
    peaks = bands.argmax(0)
    inside = slice(int(peaks[0]) + 1, int(peaks[-1]))
    np.testing.assert_allclose(sums[inside], 1)
    assert (np.diff(peaks) > 0).all()
    assert not bands[FREQUENCIES <= 64].any()
    assert not bands[-1].any()


def test_mfcc_is_the_cosine_transform_by_its_definition() -> None:
    power = spectra()
    logs = np.log(power.astype(np.float64) @ mel_bands())
    k, n = np.arange(13)[:, None], np.arange(23)
    basis = math.sqrt(2 / 23) * np.cos(np.pi * k * (2 * n + 1) / 46)
    basis[0] /= math.sqrt(2)
    np.testing.assert_allclose(mfcc(power), logs @ basis.T, atol=1e-4)


def test_a_fixed_weight_of_a_band_vanishes_with_the_mean() -> None:
    """Why there is no pre-emphasis: a gain is a constant in every coefficient."""
    power = spectra(20)
    offsets = np.array([0, 20])
    for extractor in (mfcc, plp):
        plain, louder = (normalized(extractor(gain * power), offsets) for gain in (1, 100))
        np.testing.assert_allclose(plain, louder, atol=1e-3)


OFFSETS = np.array([0, 3, 4, 10])


def test_neighbours_repeat_the_ends() -> None:
    assert neighbours(OFFSETS, 2).tolist() == [2, 2, 2, 3, 6, 7, 8, 9, 9, 9]
    assert neighbours(OFFSETS, -1).tolist() == [0, 0, 1, 3, 4, 4, 5, 6, 7, 8]


def test_deltas_are_slopes_of_lines_fitted_to_five_frames() -> None:
    frames = np.random.default_rng(0).standard_normal((10, 2)).astype(np.float32)
    found = deltas(frames, OFFSETS)
    for start, end in ((0, 3), (3, 4), (4, 10)):
        padded = np.pad(frames[start:end], ((2, 2), (0, 0)), "edge")
        for t in range(end - start):
            slopes = np.polyfit(np.arange(5), padded[t : t + 5], 1)[0]
            np.testing.assert_allclose(found[start + t], slopes, atol=1e-5)


def test_each_utterance_is_normalised_by_itself() -> None:
    frames = np.random.default_rng(0).standard_normal((10, 2)).astype(np.float32) * 7 + 3
    found = normalized(frames, OFFSETS)
    for start, end in ((0, 3), (4, 10)):
        np.testing.assert_allclose(found[start:end].mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(found[start:end].std(0), 1, atol=1e-5)
    assert not found[3].any()  # an utterance of one frame is a constant


def test_context_is_nine_frames_with_the_ends_repeated() -> None:
    frames = np.arange(20, dtype=np.float32).reshape(10, 2)
    found = with_context(frames, OFFSETS).reshape(10, 9, 2)
    assert (found[0, :, 0] / 2).tolist() == [0, 0, 0, 0, 0, 1, 2, 2, 2]
    assert (found[7, :, 0] / 2).tolist() == [4, 4, 5, 6, 7, 8, 9, 9, 9]
    np.testing.assert_array_equal(found[:, 4], frames)


def test_inputs_are_nine_frames_and_the_energy() -> None:
    features = extract([signal(1_000), signal(2_500, seed=1)])
    inputs = features.inputs()
    assert INPUTS == 352
    assert inputs.shape == (int(features.offsets[-1]), 352)
    assert inputs.dtype == features.plp.dtype == features.mfcc.dtype == np.float32
    np.testing.assert_array_equal(inputs[:, MIDDLE], features.plp)
    np.testing.assert_array_equal(inputs[:, 351:], features.log_energy)


def test_an_utterance_has_the_same_features_alone_and_among_others() -> None:
    signals = [signal(900 + 170 * i, seed=i) for i in range(4)]
    together = extract(signals)
    for i, one in enumerate(signals):
        alone = extract([one])
        rows = slice(together.offsets[i], together.offsets[i + 1])
        np.testing.assert_allclose(alone.plp, together.plp[rows], atol=2e-3)
        np.testing.assert_allclose(alone.mfcc, together.mfcc[rows], atol=2e-3)
