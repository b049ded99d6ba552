"""A corpus of sounds that are made here, and the real one where its recordings are at hand."""

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import nn

from krylov_descent.laboratory.problems import load_problem
from krylov_descent.laboratory.problems.speech import PAPER, load_speech
from krylov_descent.laboratory.sources import (
    FOLDER_VARIABLE,
    DataError,
    data_folder,
    derived_folder,
)
from krylov_descent.laboratory.speech.archives import SpokenDigits, read_digits, read_noise
from krylov_descent.laboratory.speech.corpus import Corpus, load_corpus
from krylov_descent.laboratory.speech.corpus_building import RECIPE, Form, build
from krylov_descent.laboratory.speech.features import extract
from krylov_descent.laboratory.speech.frame_errors import frame_errors
from krylov_descent.laboratory.speech.framing import FRAME, STEP
from krylov_descent.laboratory.speech.lexicon import PHONES
from krylov_descent.laboratory.speech.mixing import LEVELS, Mixer
from krylov_descent.laboratory.speech.splits import PARTS, SMALL_SPEAKERS, material
from tests.laboratory.speech.sounds import noise_clips, spoken_digits, spoken_phones

NAME = f"small-seed-0-recipe-{RECIPE}"
real_sounds = pytest.mark.skipif(
    not (data_folder() / "audiomnist8k").is_dir() or not os.environ.get(FOLDER_VARIABLE),
    reason=f"needs the recordings: set {FOLDER_VARIABLE} to the folder that holds audiomnist8k/",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the small corpus in it, and no recordings to compute it from."""
    folder = tmp_path_factory.mktemp("data")
    target = folder / "speech" / NAME
    build(
        target,
        spoken_digits(repetitions=1),
        noise_clips(),
        Form(seed=0, small=True),
        progress=False,
    )
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return load_corpus(folder, small=True)


def test_every_recording_is_there_in_all_conditions(corpus: Corpus) -> None:
    for name in PARTS:
        part = getattr(corpus, name)
        recordings = len(SMALL_SPEAKERS[name]) * 10
        assert len(part.plp) == len(part.mfcc) == 6 * recordings
        assert part.inputs.shape == (part.plp.offsets[-1], 352)
        assert part.inputs.dtype == np.float32
        assert isinstance(part.inputs, np.memmap)
        assert part.plp.frames.shape == part.mfcc.frames.shape == (len(part.states), 39)
        assert part.plp.snr.reshape(-1, 6).tolist() == [list(LEVELS)] * recordings
        assert set(part.plp.speaker) == set(SMALL_SPEAKERS[name])
        assert ((part.plp.noise == "clean") == np.isinf(part.plp.snr)).all()


def test_the_frames_are_the_features_of_what_the_mixer_renders(corpus: Corpus) -> None:
    digits = spoken_digits(repetitions=1)
    chosen = material("test", digits, noise_clips(), small=True)
    mixer = Mixer(digits, chosen, seed=0)
    for place, snr in ((0, math.inf), (7, 20.0), (13, 0.0)):
        signal, kind = mixer.render(int(chosen.recordings[place]), snr)
        expected = extract([signal])
        utterance = 6 * place + LEVELS.index(snr)
        part = corpus.test
        rows = slice(part.plp.offsets[utterance], part.plp.offsets[utterance + 1])
        np.testing.assert_allclose(part.inputs[rows], expected.inputs(), atol=5e-3)
        np.testing.assert_allclose(part.mfcc[utterance], expected.mfcc, atol=5e-3)
        np.testing.assert_array_equal(part.plp[utterance], part.inputs[rows, 156:195])
        assert part.plp.noise[utterance] == kind


def test_all_conditions_of_a_recording_have_the_same_labels(corpus: Corpus) -> None:
    for name in PARTS:
        part = getattr(corpus, name)
        labels = np.split(part.states, part.plp.offsets[1:-1])
        for first in range(0, len(labels), 6):
            for other in labels[first + 1 : first + 6]:
                np.testing.assert_array_equal(other, labels[first])


def test_the_labels_are_what_was_said(corpus: Corpus) -> None:
    """Also of speakers that the aligner has not been trained on."""
    part = corpus.test
    right = []
    for utterance in range(0, len(part.plp), 6):
        digit = int(part.plp.digit[utterance])
        middles = np.arange(part.plp.lengths[utterance]) * STEP + FRAME // 2
        rows = slice(part.plp.offsets[utterance], part.plp.offsets[utterance + 1])
        right.append(part.phones[rows] == spoken_phones(digit)[middles])
    assert np.concatenate(right).mean() > 0.85


def test_the_same_seed_gives_the_same_corpus(folder: Path, tmp_path: Path) -> None:
    sounds = spoken_digits(repetitions=1), noise_clips()
    build(tmp_path / "again", *sounds, Form(seed=0, small=True), progress=False)
    written = sorted((tmp_path / "again").rglob("*.np?"))
    assert len(written) == 4 * len(PARTS)
    for path in written:
        original = folder / "speech" / NAME / path.relative_to(tmp_path / "again")
        assert path.read_bytes() == original.read_bytes()


@dataclass(frozen=True, eq=False)
class Interrupting(SpokenDigits):
    """Is interrupted at the signal after the last that is left."""

    left: list[int]

    def signal(self, index: int) -> npt.NDArray[np.float32]:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise KeyboardInterrupt
        return super().signal(index)


def test_an_interrupted_computation_leaves_nothing(tmp_path: Path) -> None:
    digits = spoken_digits(repetitions=1)
    clean = len(digits.digit)
    interrupting = Interrupting(**vars(digits), left=[clean + 150])  # while it writes
    target = tmp_path / "speech" / NAME
    with pytest.raises(KeyboardInterrupt):
        build(target, interrupting, noise_clips(), Form(seed=0, small=True), progress=False)
    assert list(target.parent.iterdir()) == []


def test_a_change_of_the_frames_never_reaches_the_disk(folder: Path) -> None:
    first = load_corpus(folder, small=True).validation
    before = float(first.inputs[0, 0])
    first.inputs[0, 0] = before + 1
    assert load_corpus(folder, small=True).validation.inputs[0, 0] == before


def test_a_damaged_corpus_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "speech", tmp_path / "speech")
    inputs = tmp_path / "speech" / NAME / "test" / "inputs.npy"
    inputs.write_bytes(inputs.read_bytes()[:-4])
    with pytest.raises(DataError, match=rf"{NAME} is damaged.*delete that folder"):
        load_corpus(tmp_path, small=True)
    inputs.unlink()
    with pytest.raises(DataError, match=r"is damaged.*inputs\.npy"):
        load_corpus(tmp_path, small=True)


def test_what_is_computed_goes_to_the_users_cache_and_not_to_the_data(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    kept = derived_folder() / "speech" / NAME
    assert kept.is_relative_to(tmp_path)
    shutil.copytree(folder / "speech" / NAME, kept)
    # It is found there, whichever folder the data are in.
    (tmp_path / "data").mkdir()
    corpus = load_corpus(tmp_path / "data", small=True)
    frames = corpus.test.mfcc.frames
    assert isinstance(frames, np.memmap)
    assert Path(str(frames.filename)).is_relative_to(kept)
    assert list((tmp_path / "data").iterdir()) == []


def test_the_problem_is_the_papers(folder: Path, corpus: Corpus) -> None:
    problem = load_problem("speech", folder=folder, size="small")
    assert problem.title == "Noisy spoken digits, small"
    assert problem.train[0].shape[1] == 352
    assert problem.train[0].dtype == torch.float32
    assert problem.metric.name == "frame error"
    np.testing.assert_array_equal(problem.train[1].numpy(), corpus.train.phones)
    assert int(problem.train[1].max()) < len(PHONES) == 20
    model = problem.make_model(seed=0)
    assert model(problem.test[0][:2]).shape == (2, 20)
    assert problem.paper is None
    published = [(row.method, row.train, row.test, row.time) for row in PAPER.published]
    assert published == [("KSD", 0.045, 0.081, 0.3), ("HF", 0.051, 0.087, 1.0)]


def test_validation_is_by_speakers(folder: Path, corpus: Corpus) -> None:
    assert load_speech(folder=folder, size="small", validation=0).validation is None
    one = load_speech(folder=folder, size="small", validation=1).validation
    both = load_speech(folder=folder, size="small").validation
    assert one is not None
    assert both is not None
    frames = corpus.validation.plp.lengths[corpus.validation.plp.speaker == 7].sum()
    assert len(one[0]) == len(one[1]) == frames
    assert torch.equal(both[0][:frames], one[0])
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="`validation` must be 0 to 2 speakers"):
            load_speech(folder=folder, size="small", validation=wrong)


class KnowsClean(nn.Module):
    """Right on clean frames, wrong on every third of the others."""

    def __init__(self, answers: torch.Tensor) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))
        self.answers, self.seen = answers, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        answers = self.answers[self.seen : self.seen + len(inputs)]
        self.seen += len(inputs)
        return nn.functional.one_hot(answers, len(PHONES)).float()


def test_frame_errors_are_counted_per_level(corpus: Corpus) -> None:
    part = corpus.test
    answers = torch.from_numpy(part.phones)
    noisy = torch.from_numpy(np.repeat(part.plp.snr == 5.0, part.plp.lengths))
    places = noisy.nonzero()[::3, 0]
    answers[places] = (answers[places] + 1) % len(PHONES)
    found = frame_errors(KnowsClean(answers), part)
    assert [row.snr for row in found] == list(LEVELS)
    assert {row.frames for row in found} == {len(part.states) // 6}
    assert {row.snr: row.error for row in found} == {
        snr: len(places) / int(noisy.sum()) if snr == 5.0 else 0.0 for snr in LEVELS
    }


@real_sounds
def test_the_real_recordings_are_as_described() -> None:
    digits, noise = read_digits(), read_noise()
    assert len(digits.digit) == 6_000
    assert len(digits.pcm) == pytest.approx(3_852 * 8_000, rel=1e-3)
    assert sorted(set(digits.speaker)) == list(range(1, 61))
    assert noise.pcm.shape == (96, 40_000)
    assert len(set(noise.category)) == 8
    frames = sum(1 + (np.diff(digits.offsets) - FRAME) // STEP)
    assert frames == pytest.approx(374_000, rel=0.01)
    train = material("train", digits, noise, small=False).recordings
    lengths = np.diff(digits.offsets)[train]
    assert 6 * np.sum(1 + (lengths - FRAME) // STEP) == pytest.approx(1.2e6, rel=0.01)
