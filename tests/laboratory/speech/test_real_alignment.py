"""The aligner on real recordings, where they are at hand."""

import os

import numpy as np
import numpy.typing as npt
import pytest

from krylov_descent.laboratory.sources import FOLDER_VARIABLE, data_folder
from krylov_descent.laboratory.speech.alignment import Aligner, align_clean
from krylov_descent.laboratory.speech.archives import SpokenDigits, read_digits
from krylov_descent.laboratory.speech.corpus_building import clean_utterances
from krylov_descent.laboratory.speech.decoding import recognize
from krylov_descent.laboratory.speech.framing import frames_of, log_energies
from krylov_descent.laboratory.speech.lexicon import PHONES, SILENCE
from krylov_descent.laboratory.speech.utterances import Utterances

pytestmark = pytest.mark.skipif(
    not (data_folder() / "audiomnist8k").is_dir() or not os.environ.get(FOLDER_VARIABLE),
    reason=f"needs the recordings: set {FOLDER_VARIABLE} to the folder that holds audiomnist8k/",
)
HEARD, UNHEARD = range(1, 21), range(31, 41)


@pytest.fixture(scope="module")
def digits() -> SpokenDigits:
    return read_digits()


def of_speakers(digits: SpokenDigits, speakers: range) -> npt.NDArray[np.int64]:
    chosen: npt.NDArray[np.int64] = np.flatnonzero(
        np.isin(digits.speaker, speakers) & (digits.repetition < 3)
    )
    return chosen


@pytest.fixture(scope="module")
def aligner(digits: SpokenDigits) -> Aligner:
    return align_clean(clean_utterances(digits, of_speakers(digits, HEARD)), components=2)


@pytest.fixture(scope="module")
def unheard(digits: SpokenDigits) -> Utterances:
    return clean_utterances(digits, of_speakers(digits, UNHEARD))


def test_speakers_that_were_never_heard_are_understood(
    aligner: Aligner, unheard: Utterances
) -> None:
    wrong = recognize(aligner.model, unheard) != unheard.digit
    assert len(wrong) == 300
    assert wrong.mean() < 0.04


def test_silence_is_quiet_and_vowels_are_loud(
    aligner: Aligner, unheard: Utterances, digits: SpokenDigits
) -> None:
    signals = [digits.signal(int(r)) for r in of_speakers(digits, UNHEARD)]
    bounds = np.cumsum([0, *map(len, signals)])
    decibels = 10 / np.log(10) * log_energies(frames_of(np.concatenate(signals), bounds))[:, 0]
    phones = aligner.align(unheard).phones

    def level(*names: str) -> float:
        return float(decibels[np.isin(phones, [PHONES.index(name) for name in names])].mean())

    assert level("IY", "OW", "AO", "AY", "EY") - level(SILENCE) > 15
    assert level("AO", "AY", "EY") > level("F", "TH", "T") + 6
    # Each recording begins and ends with it, quieter than its middle.
    middle = decibels[(unheard.offsets[:-1] + unheard.offsets[1:]) // 2].mean()
    for ends in (unheard.offsets[:-1], unheard.offsets[1:] - 1):
        assert (phones[ends] == PHONES.index(SILENCE)).all()
        assert middle - decibels[ends].mean() > 15


def test_hisses_are_high_and_nasals_low(
    aligner: Aligner, unheard: Utterances, digits: SpokenDigits
) -> None:
    """S lies above 2 kHz, N below it; below 400 Hz there is hum in some recordings."""
    signals = [digits.signal(int(r)) for r in of_speakers(digits, UNHEARD)]
    bounds = np.cumsum([0, *map(len, signals)])
    spectra = np.abs(np.fft.rfft(frames_of(np.concatenate(signals), bounds))) ** 2
    above = spectra[:, 50:].sum(1) / spectra[:, 10:].sum(1)  # bins of 40 Hz
    phones = aligner.align(unheard).phones
    share = {name: np.median(above[phones == PHONES.index(name)]) for name in ("S", "N")}
    assert share["S"] > 0.5
    assert share["N"] < 0.2
