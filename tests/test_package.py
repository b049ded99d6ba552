"""What the package index shows of the project."""

import re

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from tests.howto import ROOT


def test_the_index_shows_the_readme_without_links_that_end_nowhere() -> None:
    shown = ProjectMetadata(str(ROOT), PluginManager()).core.readme
    assert "KSD(net, terms)" in shown
    assert re.findall(r"\]\((?!https://)", shown) == []
    assert "![" not in shown
    # The words of a link stay.
    assert "scikit-learn, skorch" in shown
    assert "https://arxiv.org/abs/1111.4259" in shown


def test_the_readme_links_to_files_that_are_there() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https://)([^)#]+)", text)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
