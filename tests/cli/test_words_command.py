"""`ksd words` on a corpus of sounds that are made here."""

import json
import re
from pathlib import Path

import pytest

from krylov_descent.cli import main
from krylov_descent.laboratory.speech.corpus_building import RECIPE, Form, build
from tests.laboratory.speech.sounds import noise_clips, spoken_digits

LEVELS = ["clean", "20 dB", "15 dB", "10 dB", "5 dB", "0 dB"]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and complaints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    out, err = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capsys.readouterr())
    code = caught.value.code
    return (code if isinstance(code, int) else 0), out, err


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the small corpus in it, and no recordings."""
    sounds = spoken_digits(repetitions=1), noise_clips()
    folder = tmp_path_factory.mktemp("data")
    target = folder / "speech" / f"small-seed-0-recipe-{RECIPE}"
    build(target, *sounds, Form(seed=0, small=True), progress=False)
    return folder


def test_a_run_on_speech_is_heard_at_every_noise_level(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = tmp_path / "run"
    options = ["--optimizer", "adam", "--passes", "2", "--data", str(data)]
    code, _, err = call(capsys, "train", "speech", "--small", *options, "--folder", str(run))
    assert code == 0, err
    code, out, err = call(capsys, "words", str(run), "--data", str(data))
    assert code == 0, err
    assert max(map(len, out.splitlines())) <= 80 or str(run) in out
    rows = re.findall(r"^  (clean|\d+ dB) +([\d.]+)% +([\d.]+)% +([\d.]+)% +([\d.]+)%", out, re.M)
    assert [row[0] for row in rows] == LEVELS
    written = json.loads((run / "words.json").read_text())
    assert written["optimizer"] == "Adam"
    assert [c["snr"] for c in written["conditions"]] == [None, 20, 15, 10, 5, 0]
    for row, condition in zip(rows, written["conditions"], strict=True):
        shares = [condition[key] for key in ("frame", "hybrid", "tandem", "mfcc")]
        assert [float(text) for text in row[1:]] == pytest.approx(
            [100 * share for share in shares], abs=0.006
        )
        assert condition["utterances"] == 20
    # These sounds are easily told apart, and the first level has no noise.
    assert max(written["conditions"][0][key] for key in ("tandem", "mfcc")) < 0.2
    assert not (run / "alignment.png").exists()  # there are no recordings to draw


def test_what_is_no_run_on_speech_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "curves"
    tiny = [f"--problem-set={key}=20" for key in ("train", "validation", "test")]
    options = ["--optimizer", "adam", "--iterations", "1", "--folder", str(run)]
    assert call(capsys, "train", "curves", "--small", *tiny, *options)[0] == 0
    for folder, sentence in (
        (run, "is a run on 'curves': words are recognised with runs on 'speech'"),
        (tmp_path / "nothing", "is not a run folder"),
    ):
        code, _, err = call(capsys, "words", str(folder))
        assert code == 1
        assert err.startswith("ksd: ")
        assert err.count("\n") == 1
        assert sentence in err


def test_a_run_without_checkpoint_is_asked_to_train_on(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["--optimizer", "adam", "--iterations", "1", "--data", str(data)]
    assert call(capsys, "train", "speech", "--small", *options, "--folder", str(run))[0] == 0
    (run / "checkpoint.pt").unlink()
    code, _, err = call(capsys, "words", str(run), "--data", str(data))
    assert code == 1
    assert "has no checkpoint yet" in err
