"""MkDocs hook: the start page is the README, so that the two cannot say different things."""

import re
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The README in place of the start page's own text; other pages as they are."""
    if page.file.src_uri != "index.md":
        return markdown
    return LINK.sub(_on_the_site, README.read_text(encoding="utf-8"))


def _on_the_site(link: re.Match[str]) -> str:
    """A link as the start page has it; one to a file that is not on the site is plain text."""
    image, text, target = link.groups()
    if target.startswith("docs/"):
        target = target.removeprefix("docs/")
    elif not target.startswith("https://"):
        return text
    return f"{image}[{text}]({target})"
