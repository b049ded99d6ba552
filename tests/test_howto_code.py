"""The code on the how-to pages and in the README runs as it is."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.howto import CODE, PAGES, ROOT, run

MOST_WORDS = 400
# A framework takes seconds to import, so its page is run where the framework is tested.
FRAMEWORKS = {"accelerate", "ignite", "lightning", "skorch", "transformers"}


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_elsewhere")
@pytest.mark.parametrize("page", sorted({page.stem for page in PAGES} - FRAMEWORKS))
def test_the_code_of_a_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(page)
    printed = capsys.readouterr().out
    assert "not finite" not in printed


@pytest.mark.parametrize("name", sorted(FRAMEWORKS))
def test_the_page_of_a_framework_is_run_where_it_is_tested(name: str) -> None:
    test = ROOT / "tests" / "integrations" / f"test_{name}.py"
    assert f'run("{name}")' in test.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    assert len(CODE.sub("", page.read_text(encoding="utf-8")).split()) < MOST_WORDS


@pytest.mark.usefixtures("_elsewhere")
def test_the_readme_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    exec(CODE.findall(text)[0].replace("range(18)", "range(3)"), {"__name__": "readme"})
    lines = capsys.readouterr().out.splitlines()
    shown = re.findall(r"```text\n(.*?)```", text, re.DOTALL)[0].splitlines()
    assert len(lines) == 3
    assert lines[0].split(" -> ")[0] == shown[0].split(" -> ")[0]  # the loss at the start


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) < 900
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("https://") or (ROOT / target).exists(), target
