import numpy as np
import pytest

from krylov_descent.laboratory.speech.lexicon import (
    DIGITS,
    PHONE_OF_STATE,
    PHONES,
    PRONUNCIATIONS,
    SILENCE,
    STATES,
    chain,
)

SPELT = "Z IY R OW/W AH N/T UW/TH R IY/F AO R/F AY V/S IH K S/S EH V AH N/EY T/N AY N"


def test_the_ten_digits_are_pronounced_with_nineteen_phones_and_silence() -> None:
    assert "/".join(" ".join(word) for word in PRONUNCIATIONS) == SPELT
    assert DIGITS == 10
    assert PHONES[0] == SILENCE
    assert set(PHONES) == {SILENCE, *SPELT.replace("/", " ").split()}
    assert len(PHONES) == 20
    assert STATES == 60
    assert [PHONES[p] for p in PHONE_OF_STATE[3:6]] == ["Z"] * 3


@pytest.mark.parametrize("digit", range(DIGITS))
def test_a_chain_spells_its_digit_between_silences(digit: int) -> None:
    states = chain(digit)
    phones = [PHONES[phone] for phone in PHONE_OF_STATE[states[::3]]]
    assert phones == [SILENCE, *PRONUNCIATIONS[digit], SILENCE]
    np.testing.assert_array_equal(states % 3, np.tile([0, 1, 2], len(phones)))
    np.testing.assert_array_equal(PHONE_OF_STATE[states], np.repeat(PHONE_OF_STATE[states[::3]], 3))


def test_states_are_shared_between_words() -> None:
    assert set(chain(0)) & set(chain(3)) == {*range(3), *chain(0)[6:12]}  # silence, IY and R
    assert (np.diff(chain(9)) != 0).all()


@pytest.mark.parametrize("digit", [-1, 10])
def test_there_are_no_other_digits(digit: int) -> None:
    with pytest.raises(ValueError, match="`digit` must be 0 to 9"):
        chain(digit)
