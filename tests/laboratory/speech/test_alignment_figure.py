from pathlib import Path

import matplotlib.image
import numpy as np
import numpy.typing as npt
import pytest

from krylov_descent.laboratory.speech.alignment_figure import (
    AlignedExample,
    clean_examples,
    draw_alignments,
)
from krylov_descent.laboratory.speech.corpus import CorpusPart
from krylov_descent.laboratory.speech.corpus_building import clean_utterances
from krylov_descent.laboratory.speech.lexicon import chain
from tests.laboratory.speech.sounds import spoken_digits


def example(digit: int = 3, frames: int = 60) -> AlignedExample:
    states = chain(digit)
    return AlignedExample(
        title=f"{digit}",
        power=np.full((frames, 129), 1e-6, np.float32),
        labels=states[np.arange(frames) * len(states) // frames],
    )


def drawn(path: Path, examples: list[AlignedExample]) -> npt.NDArray[np.float32]:
    draw_alignments(examples, path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    picture: npt.NDArray[np.float32] = matplotlib.image.imread(path)[..., :3]
    return picture


def red_columns(picture: npt.NDArray[np.float32]) -> int:
    """How many lines of phone borders there are, side by side."""
    red = (picture[..., 0] > 0.7) & (picture[..., 1] < 0.3) & (picture[..., 2] < 0.3)
    there = red.sum(0) > 20
    return int((np.diff(there.astype(int)) == 1).sum())


@pytest.mark.parametrize(("digit", "phones"), [(3, 3), (7, 5), (8, 2)])
def test_a_line_stands_at_every_border_of_phones(tmp_path: Path, digit: int, phones: int) -> None:
    picture = drawn(tmp_path / "deep" / "a.png", [example(digit)])
    assert red_columns(picture) == phones + 1


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_number_of_examples_is_drawn(tmp_path: Path, count: int) -> None:
    picture = drawn(tmp_path / "a.png", [example()] * count)
    assert picture.shape[0] == pytest.approx(345 * -(-count // 2), abs=2)


def test_digital_silence_can_be_drawn(tmp_path: Path) -> None:
    quiet = AlignedExample("quiet", np.zeros((60, 129), np.float32), example().labels)
    drawn(tmp_path / "a.png", [quiet])


def test_examples_show_each_digit_with_its_own_labels() -> None:
    digits = spoken_digits(repetitions=1)
    chosen = np.flatnonzero(np.isin(digits.speaker, (3, 12)))
    plp = clean_utterances(digits, chosen)
    states = np.arange(len(plp.frames)) % 60
    part = CorpusPart(inputs=plp.frames, states=states, plp=plp, mfcc=plp)
    found = clean_examples(part, digits)
    assert [e.title[0] for e in found] == list("0123456789")
    assert {e.title.split()[-1] for e in found} == {"3", "12"}
    for e in found:
        assert len(e.power) == len(e.labels)
        utterance = np.flatnonzero(
            (plp.digit == int(e.title[0])) & (plp.speaker == int(e.title.split()[-1]))
        )[0]
        np.testing.assert_array_equal(
            e.labels, states[plp.offsets[utterance] : plp.offsets[utterance + 1]]
        )
