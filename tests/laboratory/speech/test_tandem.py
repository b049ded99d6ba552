import numpy as np
import numpy.typing as npt
import pytest

from krylov_descent.laboratory.speech.decoding import Posteriors, log_priors, recognize
from krylov_descent.laboratory.speech.digit_hmm import DigitHmm
from krylov_descent.laboratory.speech.hmm import count_transitions
from krylov_descent.laboratory.speech.lexicon import PHONE_OF_STATE, STATES
from krylov_descent.laboratory.speech.mixtures import grown_mixtures
from krylov_descent.laboratory.speech.tandem import (
    WEIGHTS,
    TwoStreams,
    beside,
    principal_axes,
    train_on_all_conditions,
    train_tandem,
)
from krylov_descent.laboratory.speech.utterances import Utterances
from tests.laboratory.speech.spoken import speech, state_means


def correlated(count: int = 2000) -> npt.NDArray[np.float32]:
    generator = np.random.default_rng(0)
    mixing = generator.standard_normal((5, 5)) * [10, 3, 1, 0.3, 0.01]
    return (7 + generator.standard_normal((count, 5)) @ mixing.T).astype(np.float32)


def test_the_coordinates_are_uncorrelated_and_ordered() -> None:
    frames = correlated()
    found = principal_axes(frames, kept=1.0)(frames).astype(np.float64)
    assert found.shape == frames.shape
    covariance = np.cov(found.T, bias=True)
    variances = np.diag(covariance)
    assert (np.diff(variances) <= 0).all()
    scale = np.sqrt(np.outer(variances, variances))
    assert np.abs(covariance / scale - np.eye(5)).max() < 1e-2
    np.testing.assert_allclose(
        variances, np.linalg.eigvalsh(np.cov(frames.T.astype(np.float64), bias=True))[::-1], 1e-3
    )
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-3)


@pytest.mark.parametrize("kept", [0.5, 0.9, 0.99, 0.9999])
def test_the_fewest_axes_hold_the_share_asked_for(kept: float) -> None:
    frames = correlated()
    axes = principal_axes(frames, kept)
    shares = axes(frames).var(0, dtype=np.float64) / frames.var(0, dtype=np.float64).sum()
    assert shares.sum() > kept - 1e-5
    assert shares[:-1].sum() < kept
    # What is left out is what the remaining axes cannot say.
    back = axes(frames) @ axes.axes.T + axes.mean
    lost = ((frames - back) ** 2).sum(1).mean() / frames.var(0, dtype=np.float64).sum()
    assert lost == pytest.approx(1 - shares.sum(), abs=1e-5)


@pytest.mark.parametrize("kept", [0.0, 1.1])
def test_a_share_is_between_nothing_and_all(kept: float) -> None:
    with pytest.raises(ValueError, match="`kept`"):
        principal_axes(correlated(), kept)


def parts(utterances: Utterances) -> tuple[Utterances, npt.NDArray[np.float32]]:
    """Half of the coefficients stand for MFCCs, the other half for what a network adds."""
    return utterances.with_frames(utterances.frames[:, :4]), utterances.frames[:, 4:]


def test_posteriors_beside_weak_features_recognize_more() -> None:
    (weak, added), states = parts(speech(400, noise=6.0)[0]), speech(400, noise=6.0)[1]
    (deciding, deciding_added), (unseen, unseen_added) = (
        parts(speech(200, noise=6.0, seed=seed)[0]) for seed in (3, 4)
    )
    axes = principal_axes(added, kept=1.0)
    baseline = train_on_all_conditions(weak, states, components=1)
    tandem = train_tandem(
        baseline, axes(added), states, beside(deciding, deciding_added, axes), components=1
    )
    plain = (recognize(baseline, unseen) != unseen.digit).mean()
    helped = (recognize(tandem, beside(unseen, unseen_added, axes)) != unseen.digit).mean()
    assert helped < 0.7 * plain
    # Both halves are equally good and independent here, so full weight is right.
    assert isinstance(tandem.acoustics, TwoStreams)
    assert tandem.acoustics.weight == max(WEIGHTS)


def test_useless_posteriors_get_the_least_weight() -> None:
    """The network is sure of the training speakers and knows nothing of others."""
    utterances, states = speech(200, noise=4.0)
    deciding, _ = speech(200, noise=4.0, seed=3)
    generator = np.random.default_rng(0)
    sure = state_means(4, seed=9)[states].astype(np.float32)
    sure += 0.5 * generator.standard_normal(sure.shape).astype(np.float32)
    lost = generator.permutation(np.repeat(sure, 2, axis=0))[: len(deciding.frames)]
    baseline = train_on_all_conditions(utterances, states, components=1)
    features = deciding.with_frames(np.concatenate([deciding.frames, lost], 1))
    tandem = train_tandem(baseline, sure, states, features, components=1)
    assert isinstance(tandem.acoustics, TwoStreams)
    assert tandem.acoustics.weight == min(WEIGHTS)


def test_two_streams_are_one_mixture_where_each_has_one_gaussian() -> None:
    """Diagonal Gaussians of independent halves multiply to the Gaussian of the whole."""
    utterances, states = speech(100)
    whole, first, second = (
        grown_mixtures(utterances.frames[:, columns], states, STATES, 1)
        for columns in (slice(None), slice(0, 4), slice(4, None))
    )
    expected = whole.log_likelihoods(utterances.frames)
    found = TwoStreams(first, second, 1.0).log_likelihoods(utterances.frames)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2)
    some = TwoStreams(first, second, 0.5).log_likelihoods(utterances.frames, [7, 3])
    half = first.log_likelihoods(utterances.frames[:, :4], [7, 3])
    half += 0.5 * second.log_likelihoods(utterances.frames[:, 4:], [7, 3])
    np.testing.assert_allclose(some, half, rtol=1e-4, atol=1e-3)


def test_a_baseline_without_mixtures_is_refused() -> None:
    utterances, states = speech(20)
    transitions = count_transitions(states, utterances.offsets, STATES)
    hybrid = DigitHmm(Posteriors(log_priors(PHONE_OF_STATE[states])), transitions)
    with pytest.raises(TypeError, match="`baseline`"):
        train_tandem(hybrid, utterances.frames, states, utterances)
