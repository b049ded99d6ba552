"""The how-to pages and their code."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "howto").glob("*.md"))
CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def run(page: str) -> None:
    """Run the code of a page, named without its folder and ending, in the current folder."""
    blocks = CODE.findall((ROOT / "docs" / "howto" / f"{page}.md").read_text(encoding="utf-8"))
    assert blocks
    exec("\n".join(blocks), {"__name__": page})
