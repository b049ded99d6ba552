from dataclasses import replace

import numpy as np
import pytest

from krylov_descent.laboratory.speech.utterances import CLEAN, Utterances

FRAMES = np.arange(12, dtype=np.float32).reshape(6, 2)
THREE = Utterances(
    frames=FRAMES,
    offsets=np.array([0, 2, 3, 6]),
    digit=np.array([4, 0, 9]),
    speaker=np.array([1, 1, 2]),
    snr=np.array([np.inf, 10.0, 0.0]),
    noise=np.array([CLEAN, "rain", "babble"]),
)


def test_utterances_are_slices_of_the_frames() -> None:
    assert len(THREE) == 3
    assert THREE.lengths.tolist() == [2, 1, 3]
    np.testing.assert_array_equal(THREE[2], FRAMES[3:])
    assert [len(frames) for frames in THREE] == [2, 1, 3]
    assert np.shares_memory(THREE[1], FRAMES)


def test_some_of_them_can_be_chosen() -> None:
    noisy = THREE.select(np.isfinite(THREE.snr))
    np.testing.assert_array_equal(noisy.frames, FRAMES[2:])
    assert noisy.offsets.tolist() == [0, 1, 4]
    assert (noisy.digit.tolist(), noisy.noise.tolist()) == ([0, 9], ["rain", "babble"])
    assert THREE.frame_rows(THREE.speaker == 1).tolist() == [True] * 3 + [False] * 3
    assert len(THREE.select(THREE.digit == 7)) == 0


def test_they_can_be_described_by_other_coefficients() -> None:
    other = THREE.with_frames(np.ones((6, 5), np.float32))
    assert other[0].shape == (2, 5)
    assert other.digit is THREE.digit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": FRAMES[:, 0]}, "`frames` must be"),
        ({"frames": FRAMES[:5]}, "`offsets` must rise from 0 to the 5 frames"),
        ({"offsets": np.array([0, 2, 6])}, "`offsets` must rise"),
        ({"offsets": np.array([0, 3, 3, 6])}, "`offsets` must rise"),
        ({"speaker": np.array([1, 2])}, "`speaker` must have one entry for each of the 3"),
        ({"noise": np.array([CLEAN])}, "`noise` must have one entry"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(THREE, **change)
