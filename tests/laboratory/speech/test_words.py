"""Word errors where everything is known: frames drawn from HMMs, a network that knows the means."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from krylov_descent.laboratory.speech.corpus import Corpus, CorpusPart
from krylov_descent.laboratory.speech.lexicon import PHONES
from krylov_descent.laboratory.speech.words import log_posteriors, word_errors
from tests.laboratory.speech.spoken import speech, state_means

DIMENSION, WEAK = 8, 3
NOISE = 4.0


class BestGuess(nn.Module):
    """log p(x, phone) of Gaussians about the known means, all states equally likely."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.from_numpy(state_means(DIMENSION)).float())

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        by_state = -0.5 * torch.cdist(frames, self.means).square() / NOISE**2
        return torch.logsumexp(by_state.unflatten(1, (len(PHONES), -1)), 2)


def part(count: int, seed: int) -> CorpusPart:
    """The network sees all coefficients, the mixtures but a few of them."""
    utterances, states = speech(count, dimension=DIMENSION, noise=NOISE, seed=seed)
    weak = utterances.with_frames(utterances.frames[:, :WEAK])
    return CorpusPart(inputs=utterances.frames, states=states, plp=utterances, mfcc=weak)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(train=part(300, 1), validation=part(10, 2), test=part(300, 3))


def test_posteriors_sum_to_one_and_do_not_depend_on_batches(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = log_posteriors(BestGuess(), corpus.validation)
    assert found.dtype == np.float32
    assert found.shape == (len(corpus.validation.states), len(PHONES))
    np.testing.assert_allclose(np.exp(found).sum(1), 1, rtol=1e-5)
    monkeypatch.setattr("krylov_descent.laboratory.speech.words.BATCH", 100)
    np.testing.assert_allclose(log_posteriors(BestGuess(), corpus.validation), found, atol=1e-4)


def test_a_good_network_helps_at_every_noise_level(corpus: Corpus) -> None:
    stages: list[str] = []
    errors = word_errors(BestGuess(), corpus, components=1, on_stage=stages.append)
    assert [row.snr for row in errors] == [math.inf, 10.0]
    assert sum(row.utterances for row in errors) == len(corpus.test.plp)
    for row in errors:
        assert row.tandem < 0.5 * row.mfcc
        # Far from chance, though the states of a phone, which differ here, are all alike to it.
        assert row.hybrid < 0.6
        assert 0.01 < row.mfcc < 0.9
    assert len(stages) == 4
    # The frame error, weighted by frames, is that of the network on the whole test set.
    wrong = log_posteriors(BestGuess(), corpus.test).argmax(1) != corpus.test.phones
    of_clean = np.repeat(np.isinf(corpus.test.plp.snr), corpus.test.plp.lengths)
    assert errors[0].frame == pytest.approx(wrong[of_clean].mean())
    assert errors[1].frame == pytest.approx(wrong[~of_clean].mean())
