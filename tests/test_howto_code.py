"""The code on the tutorials, the how-to pages and in the README runs as it is."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.howto import CODE, PAGES, ROOT, run

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TEXTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = re.compile(r"```text\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?(ksd [^#\n]*)", re.MULTILINE)
NUMBER = re.compile(r"\d[\d.e+-]*")
MOST_WORDS = 400
# A framework takes seconds to import, so its page is run where the framework is tested.
FRAMEWORKS = {"accelerate", "ignite", "lightning", "skorch", "transformers"}
# The first is run by tests/distributed/test_torchrun.py on several processes; the second has
# commands alone.
ELSEWHERE = {"processes", "laboratory"}


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("page", sorted({page.stem for page in PAGES} - FRAMEWORKS - ELSEWHERE))
def test_the_code_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(page)
    assert "not finite" not in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_the_page_of_a_framework_is_run_where_it_is_tested(name: str) -> None:
    test = ROOT / "tests" / "integrations" / f"test_{name}.py"
    assert f'run("{name}")' in test.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(CODE.sub("", page.read_text(encoding="utf-8")).split()) < MOST_WORDS


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_and_draws_what_it_shows(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": page.stem}
    exec("\n".join(CODE.findall(text)), names)
    lines = capsys.readouterr().out.splitlines()
    shown = SHOWN.findall(text)[0].splitlines()
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in shown]
    picture = Path(f"{page.stem}.svg")
    assert picture.exists()
    assert page.with_suffix(".svg").exists()
    assert f"]({picture})" in text
    assert names["result"].loss_after < 1e-3


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_the_commands_of_a_page_are_understood(page: Path) -> None:
    typer = pytest.importorskip("typer")
    from krylov_descent.cli import app

    for line in COMMAND.findall(page.read_text(encoding="utf-8")):
        command, words = typer.main.get_command(app), shlex.split(line)
        while commands := getattr(command, "commands", {}):
            command, words = commands[words[1]], words[1:]
        command.make_context(words[0], words[1:])  # wrong options raise


@pytest.mark.usefixtures("_elsewhere")
def test_the_readme_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    exec(CODE.findall(text)[0].replace("range(18)", "range(3)"), {"__name__": "readme"})
    lines = capsys.readouterr().out.splitlines()
    shown = SHOWN.findall(text)[0].splitlines()
    assert len(lines) == 3
    assert lines[0].split(" -> ")[0] == shown[0].split(" -> ")[0]  # the loss at the start


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 900
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
