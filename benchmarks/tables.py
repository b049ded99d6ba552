"""Tables in README and docs, generated from the JSON files, so that no figure is typed by hand.

A page marks where a table goes; its name is the JSON file's:

    <!-- generated:product -->
    <!-- end:product -->
"""

import json
import re
from pathlib import Path

from benchmarks.parts import PARTS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(
    r"^<!-- generated:(?P<name>[\w-]+) -->\n.*?^<!-- end:(?P=name) -->$", re.DOTALL | re.MULTILINE
)
START = re.compile(r"^<!-- generated:", re.MULTILINE)


def update(root: Path, results: Path, *, check: bool) -> int:
    """Bring the tables up to date, or only say which are not; the exit status."""
    pages = outdated(root, results)
    for page, text in pages.items():
        if not check:
            page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(root)}: {'out of date' if check else 'updated'}")
    if check and pages:
        print("Run `python -m benchmarks tables`.")
        return 1
    return 0


def outdated(root: Path = ROOT, results: Path = RESULTS) -> dict[Path, str]:
    """Pages whose tables are not what the results say, each with the text that would be right."""
    pages = [*root.glob("README.md"), *sorted(root.glob("docs/**/*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    filled = {page: fill(text, results, page.name) for page, text in texts.items()}
    return {page: filled[page] for page, text in texts.items() if filled[page] != text}


def fill(text: str, results: Path, page: str = "the page") -> str:
    """The text with every table made anew; empty where there is no result yet."""
    if len(START.findall(text)) != len(BLOCK.findall(text)):
        raise ValueError(f"{page} has a `<!-- generated:NAME -->` without its `<!-- end:NAME -->`")

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        path = results / f"{name}.json"
        if name.split("-")[0] not in PARTS:
            raise ValueError(f"{page} asks for a table {name!r}; there are {', '.join(PARTS)}")
        body = f"\n{_table(path)}\n\n" if path.exists() else ""
        return f"<!-- generated:{name} -->\n{body}<!-- end:{name} -->"

    return BLOCK.sub(block, text)


def _table(path: Path) -> str:
    result = json.loads(path.read_text(encoding="utf-8"))
    return PARTS[result["part"]].table(result)
