import math
from itertools import combinations

import numpy as np
import pytest

from krylov_descent.laboratory.speech.archives import SpokenDigits, unit_level
from krylov_descent.laboratory.speech.mixing import BABBLE, LEVELS, Mixer, mix
from krylov_descent.laboratory.speech.splits import (
    PARTS,
    SMALL_SPEAKERS,
    WOMEN,
    material,
    speakers_of,
)
from krylov_descent.laboratory.speech.utterances import CLEAN
from tests.laboratory.speech.sounds import CATEGORIES, noise_clips, spoken_digits


@pytest.fixture(scope="module")
def digits() -> SpokenDigits:
    return spoken_digits()


@pytest.fixture
def mixer(digits: SpokenDigits) -> Mixer:
    return Mixer(digits, material("train", digits, noise_clips(), small=True), seed=0)


@pytest.mark.parametrize("snr", LEVELS[1:])
def test_the_ratio_is_what_was_asked_for(digits: SpokenDigits, mixer: Mixer, snr: float) -> None:
    for recording in (0, 7, 30):
        noisy, kind = mixer.render(recording, snr)
        speech = digits.signal(recording)
        noise = noisy.astype(np.float64) - speech
        measured = 10 * math.log10(np.sum(speech.astype(np.float64) ** 2) / np.sum(noise**2))
        assert measured == pytest.approx(snr, abs=0.01)
        assert kind in (*CATEGORIES, BABBLE)


def test_speech_has_one_level_whatever_it_was_recorded_at(digits: SpokenDigits) -> None:
    signal = digits.signal(5)
    assert np.sqrt(np.mean(signal.astype(np.float64) ** 2)) == pytest.approx(1, abs=1e-6)
    louder = SpokenDigits(
        30 * digits.pcm, digits.offsets, digits.digit, digits.speaker, digits.repetition
    )
    np.testing.assert_allclose(louder.signal(5), signal, atol=1e-5)
    assert not unit_level(np.zeros(10)).any()


def test_clean_speech_is_the_recording(digits: SpokenDigits, mixer: Mixer) -> None:
    signal, kind = mixer.render(3, math.inf)
    np.testing.assert_array_equal(signal, digits.signal(3))
    assert kind == CLEAN


def test_the_noise_depends_on_seed_recording_and_ratio_alone(
    digits: SpokenDigits, mixer: Mixer
) -> None:
    chosen = material("train", digits, noise_clips(), small=True)
    backwards = Mixer(digits, chosen, seed=0)
    wanted = [(recording, snr) for recording in (0, 1, 20) for snr in LEVELS]
    rendered = {key: backwards.render(*key) for key in reversed(wanted)}
    for key in wanted:
        signal, kind = mixer.render(*key)
        np.testing.assert_array_equal(signal, rendered[key][0])
        assert kind == rendered[key][1]
    other = Mixer(digits, chosen, seed=1)
    assert any((other.render(0, snr)[0] != mixer.render(0, snr)[0]).any() for snr in LEVELS[1:])


def test_all_kinds_of_noise_are_equally_likely(mixer: Mixer) -> None:
    kinds = [mixer.render(recording, snr)[1] for recording in range(40) for snr in LEVELS[1:]]
    shares = {kind: kinds.count(kind) / len(kinds) for kind in (*CATEGORIES, BABBLE)}
    assert sum(shares.values()) == 1
    assert all(0.23 < share < 0.44 for share in shares.values())


def test_babble_is_the_others_of_the_part(digits: SpokenDigits) -> None:
    """Where only one other speaker is heard, and says one thing, the noise is that."""
    two = np.flatnonzero(np.isin(digits.speaker, (7, 47)) & (digits.repetition == 0))
    two = two[np.isin(digits.digit[two], (1, 4))]
    chosen = material("validation", digits, noise_clips(), small=True)
    mixer = Mixer(digits, type(chosen)(two, {}), seed=0)
    recording = int(two[0])
    noisy, kind = mixer.render(recording, 0.0)
    assert kind == BABBLE
    noise = noisy.astype(np.float64) - digits.signal(recording)
    candidates = [digits.signal(int(r)) for r in two if digits.speaker[r] == 47]
    best = max(
        abs(np.corrcoef(noise, np.take(signal, np.arange(s, s + len(noise)), mode="wrap"))[0, 1])
        for signal in candidates
        for s in range(len(signal))
    )
    assert best > 0.999


def test_noise_that_cannot_be_mixed_is_refused(digits: SpokenDigits) -> None:
    speech = digits.signal(0)
    with pytest.raises(ValueError, match="silent"):
        mix(speech, np.zeros_like(speech), 10)
    with pytest.raises(ValueError, match="`noise` must have"):
        mix(speech, speech[1:], 10)
    alone = np.flatnonzero(digits.speaker == 1)
    chosen = material("train", digits, noise_clips(), small=True)
    with pytest.raises(ValueError, match="second speaker"):
        Mixer(digits, type(chosen)(alone, {}), seed=0).render(int(alone[0]), 5.0)


@pytest.mark.parametrize("small", [False, True])
def test_no_speaker_is_in_two_parts_and_both_sexes_are_in_each(small: bool) -> None:
    parts = [set(speakers_of(part, small)) for part in PARTS]
    assert not any(one & other for one, other in combinations(parts, 2))
    assert all(part & set(WOMEN) and part - set(WOMEN) for part in parts)
    if small:
        full = [set(speakers_of(part, False)) for part in PARTS]
        assert all(few <= many for few, many in zip(parts, full, strict=True))
    else:
        assert [len(part) for part in parts] == [32, 8, 20]
        assert [len(part & set(WOMEN)) for part in parts] == [6, 2, 4]


def test_no_clip_is_in_two_parts(digits: SpokenDigits) -> None:
    noise = noise_clips()
    found = [material(part, digits, noise, small=True).clips for part in PARTS]
    for category in CATEGORIES:
        clips = [{clip.tobytes() for clip in part[category]} for part in found]
        assert [len(part) for part in clips] == [6, 2, 4]
        assert len(set.union(*clips)) == 12


def test_the_small_form_has_two_repetitions_of_its_speakers() -> None:
    digits = spoken_digits(repetitions=3)
    chosen = material("test", digits, noise_clips(), small=True).recordings
    assert set(digits.speaker[chosen]) == set(SMALL_SPEAKERS["test"])
    assert set(digits.repetition[chosen]) == {0, 1}
    assert len(chosen) == 2 * 10 * 2
