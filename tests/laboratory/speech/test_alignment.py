import numpy as np
import pytest

from krylov_descent.laboratory.speech.alignment import (
    PHONE_ROUNDS,
    Aligner,
    align_clean,
    flat_labels,
    train,
)
from krylov_descent.laboratory.speech.lexicon import PHONE_OF_STATE, chain
from krylov_descent.laboratory.speech.utterances import Utterances
from tests.laboratory.speech.spoken import STAY, speech, state_means


def test_a_flat_start_cuts_each_utterance_evenly() -> None:
    utterances, _ = speech(20)
    labels = flat_labels(utterances)
    for u, digit in enumerate(utterances.digit):
        own = labels[utterances.offsets[u] : utterances.offsets[u + 1]]
        places = np.concatenate([[0], np.cumsum(np.diff(own) != 0)])
        np.testing.assert_array_equal(chain(digit)[places], own)
        assert places[-1] == len(chain(digit)) - 1
        assert np.ptp(np.bincount(places)) <= 1


def test_training_from_a_flat_start_finds_the_states_that_were_spoken() -> None:
    utterances, states = speech(400)
    history: list[tuple[int, float]] = []
    aligner = align_clean(utterances, components=2, on_round=lambda *round_: history.append(round_))
    unseen, spoken = speech(100, seed=5)
    flat = (flat_labels(unseen) != spoken).mean()
    wrong = (aligner.align(unseen).labels != spoken).mean()
    assert flat > 0.5
    assert wrong < 0.06
    assert (aligner.align(utterances).labels != states).mean() < 0.06
    single = [likelihood for components, likelihood in history if components == 1]
    by_phone, by_state = single[1:PHONE_ROUNDS], single[PHONE_ROUNDS:]
    for likelihoods in (by_phone, by_state):
        # Alternating maximisation never loses likelihood, up to pseudocounts and, with a Gaussian
        # a phone, the equal parts that its states are given.
        assert (np.diff(likelihoods) > -0.02).all()
    assert by_phone[-1] < by_state[0]
    assert history[-1][0] == 2
    stay = aligner.model.transitions.log_stay.exp()
    assert (stay - STAY).abs().mean() < 0.08


def test_training_from_the_true_states_finds_their_means() -> None:
    utterances, states = speech(400)
    model = train(utterances, states, components=1, rounds=1)
    found = model.acoustics.means[:, 0].numpy()  # type: ignore[attr-defined]
    assert np.abs(found - state_means(8)).mean() < 0.1


def test_an_alignment_runs_through_its_chain_and_names_phones() -> None:
    utterances, _ = speech(60)
    alignment = align_clean(utterances, components=1).align(utterances)
    np.testing.assert_array_equal(alignment.phones, PHONE_OF_STATE[alignment.labels])
    for u, digit in enumerate(utterances.digit):
        own = alignment.labels[utterances.offsets[u] : utterances.offsets[u + 1]]
        visited = own[np.concatenate([[True], np.diff(own) != 0])]
        np.testing.assert_array_equal(visited, chain(digit))


def test_the_same_speech_is_aligned_the_same_way_every_time() -> None:
    utterances, _ = speech(60)
    first, second = (align_clean(utterances, components=2) for _ in range(2))
    one, two = first.align(utterances), second.align(utterances)
    np.testing.assert_array_equal(one.labels, two.labels)
    assert one.log_likelihood == two.log_likelihood


def test_utterances_are_aligned_alone_as_in_company() -> None:
    utterances, states = speech(60)
    aligner = Aligner(train(utterances, states, components=1))
    labels = aligner.align(utterances).labels
    chosen = np.zeros(60, bool)
    chosen[[7, 33]] = True
    alone = aligner.align(utterances.select(chosen)).labels
    np.testing.assert_array_equal(alone, labels[utterances.frame_rows(chosen)])


def test_what_cannot_be_aligned_or_trained_is_named() -> None:
    utterances, states = speech(30)
    with pytest.raises(ValueError, match="`components` must be 1, 2, 4, 8, …, found 3"):
        train(utterances, states, components=3)
    with pytest.raises(ValueError, match="`components` must be 1, 2, 4, 8, …, found 0"):
        train(utterances, states, components=0)
    with pytest.raises(ValueError, match="`labels` must have one state for each"):
        train(utterances, states[:-1], components=1)
    short = Utterances(
        frames=np.zeros((9, 8), np.float32),
        offsets=np.array([0, 9]),
        digit=np.array([7]),
        speaker=np.array([41]),
        snr=np.array([np.inf]),
        noise=np.array(["clean"]),
    )
    aligner = Aligner(train(utterances, states, components=1))
    with pytest.raises(ValueError, match=r"number 0, a 7 by speaker 41, has 9 frames.*at least 21"):
        aligner.align(short)


@pytest.mark.gpu
def test_the_gpu_finds_the_same_borders() -> None:
    utterances, _ = speech(200)
    cpu, gpu = (align_clean(utterances, components=2, device=d) for d in ("cpu", "cuda"))
    assert gpu.model.acoustics.log_likelihoods(utterances.frames[:1]).is_cuda
    differing = cpu.align(utterances).labels != gpu.align(utterances).labels
    assert differing.mean() < 0.001
