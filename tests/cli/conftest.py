import re
from pathlib import Path

import pytest

from krylov_descent.cli import main
from tests.cli.asking import Answer, Ksd


@pytest.fixture
def ksd(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ksd:
    """The command in this process, on a terminal of 80 columns, in a folder of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(list(words))
        out, err = (re.sub(r"\x1b\[[0-9;]*m", "", text) for text in capsys.readouterr())
        code = caught.value.code
        return Answer(code if isinstance(code, int) else 0, out, err)

    return call
