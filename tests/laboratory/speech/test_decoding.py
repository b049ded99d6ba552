import numpy as np
import pytest
import torch

from krylov_descent.laboratory.speech.alignment import train
from krylov_descent.laboratory.speech.decoding import (
    Posteriors,
    errors_by_snr,
    log_priors,
    recognize,
)
from krylov_descent.laboratory.speech.digit_hmm import DigitHmm
from krylov_descent.laboratory.speech.hmm import viterbi
from krylov_descent.laboratory.speech.lexicon import DIGITS, PHONE_OF_STATE, PHONES, chain
from tests.laboratory.speech.spoken import speech


def test_digits_are_recognized_from_mixtures() -> None:
    utterances, states = speech(300, noise=3.0)
    model = train(utterances, states, components=1, rounds=1)
    unseen, _ = speech(200, noise=3.0, seed=7)
    assert (recognize(model, unseen) != unseen.digit).mean() < 0.02
    # Speech that says nothing is recognised by chance: the network has no favourite digit.
    nothing, _ = speech(200, noise=1e3, seed=7)
    assert (recognize(model, nothing) != nothing.digit).mean() > 0.7


def test_the_digit_is_that_of_the_most_probable_path() -> None:
    utterances, states = speech(40, noise=6.0)
    model = train(utterances, states, components=1)
    found = recognize(model, utterances)
    for u in range(40):
        scores = model.acoustics.log_likelihoods(utterances[u])
        length = torch.tensor([len(scores)])
        heard = [
            viterbi(scores[None, :, chain(d)], length, chain(d), model.transitions)[0].item()
            for d in range(DIGITS)
        ]
        assert found[u] == np.argmax(heard)


def test_posteriors_over_priors_give_back_the_likelihoods_bayes_started_from() -> None:
    generator = np.random.default_rng(0)
    phones = generator.integers(0, len(PHONES), 1000)
    priors = log_priors(phones)
    np.testing.assert_allclose(priors.exp(), np.bincount(phones) / 1000, rtol=1e-5)
    log_likelihoods = generator.standard_normal((50, len(PHONES)))
    joint = log_likelihoods + priors.numpy()
    evidence = np.logaddexp.reduce(joint, axis=1, keepdims=True)
    frames = (joint - evidence).astype(np.float32)
    found = Posteriors(priors).log_likelihoods(frames).numpy() + evidence
    np.testing.assert_allclose(found, log_likelihoods[:, PHONE_OF_STATE], atol=1e-5)
    some = Posteriors(priors).log_likelihoods(frames, [5, 0]).numpy() + evidence
    np.testing.assert_allclose(some, log_likelihoods[:, [1, 0]], atol=1e-5)


def test_a_phone_that_never_occurred_has_a_finite_prior() -> None:
    priors = log_priors(np.zeros(100, np.int64))
    assert priors.isfinite().all()
    assert priors.exp().sum().item() == pytest.approx(1)


def test_digits_are_recognized_from_posteriors() -> None:
    """With p(x | phone) from the very distribution that the speech was drawn from."""
    utterances, states = speech(200, noise=2.0)
    model = train(utterances, states, components=1, rounds=1)
    priors = log_priors(PHONE_OF_STATE[states])
    by_state = model.acoustics.log_likelihoods(utterances.frames).unflatten(1, (-1, 3))
    log_posteriors = (by_state.logsumexp(2) + priors).log_softmax(1).numpy()
    hybrid = DigitHmm(Posteriors(priors), model.transitions)
    digits = recognize(hybrid, utterances.with_frames(log_posteriors))
    assert (digits != utterances.digit).mean() < 0.03


def test_errors_are_counted_at_each_noise_level_from_clean_to_loud() -> None:
    snr = np.array([0.0, np.inf, 20.0, 0.0, np.inf, 0.0, 0.0])
    wrong = np.array([True, False, True, False, False, True, False])
    assert list(errors_by_snr(wrong, snr).items()) == [(np.inf, 0.0), (20.0, 1.0), (0.0, 0.5)]
