"""What is said: phones, the pronunciations of the ten digits, and the HMM states behind them.

Every phone has three states of its own wherever it occurs (monophones), so the states are numbered
once: state 3p + i is part i of phone p. An utterance is silence, one digit, silence, and runs
through its states from left to right. The silences cannot be left out: where they could, the last
phone of a digit learnt to be the end of the recording.
"""

import numpy as np
import numpy.typing as npt

SILENCE = "SIL"
PRONUNCIATIONS: tuple[tuple[str, ...], ...] = (
    ("Z", "IY", "R", "OW"),
    ("W", "AH", "N"),
    ("T", "UW"),
    ("TH", "R", "IY"),
    ("F", "AO", "R"),
    ("F", "AY", "V"),
    ("S", "IH", "K", "S"),
    ("S", "EH", "V", "AH", "N"),
    ("EY", "T"),
    ("N", "AY", "N"),
)
DIGITS = len(PRONUNCIATIONS)
# Silence first, then the phones in the order in which the digits bring them up.
PHONES: tuple[str, ...] = tuple(
    dict.fromkeys([SILENCE, *(phone for word in PRONUNCIATIONS for phone in word)])
)
PARTS = 3
STATES = PARTS * len(PHONES)
# [STATES] the phone of each state.
PHONE_OF_STATE: npt.NDArray[np.int64] = np.repeat(np.arange(len(PHONES)), PARTS)


def chain(digit: int) -> npt.NDArray[np.int64]:
    """The states [L] of an utterance in their order: silence, the digit, silence.

    A state may stand at several places, never at two neighbouring ones.

    Args:
        digit: 0 to 9.
    """
    if not 0 <= digit < DIGITS:
        raise ValueError(f"`digit` must be 0 to {DIGITS - 1}, found {digit}")
    phones = [PHONES.index(phone) for phone in (SILENCE, *PRONUNCIATIONS[digit], SILENCE)]
    return np.array([PARTS * phone + part for phone in phones for part in range(PARTS)], np.int64)
