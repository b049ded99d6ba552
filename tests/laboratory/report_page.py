"""A report read back: its elements, table rows and chart data."""

import json
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.report import write_report

VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """What is in a page: elements, texts, and whether everything opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.open, self.elements = text, [""], Counter[str]()
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.data: list[Any] = []
        self.headings: list[str] = []
        self.commands: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and "tr" in self.open:
            self.rows[-1].append("")
        elif tag in ("h1", "h2"):
            self.headings.append("")
        elif tag == "code":
            self.commands.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data
        if self.open[-1] in ("h1", "h2"):
            self.headings[-1] += data
        if "code" in self.open:
            self.commands[-1] += data
        if self.open[-1] == "script" and ("class", "data") in self.attributes[-1][1].items():
            self.data.append(json.loads(data, parse_constant=pytest.fail))

    def row(self, name: str) -> list[str]:
        """The cells of the first table row that begins with `name`."""
        return next(row for row in self.rows if row and row[0] == name)


def report(folders: list[RunFolder], tmp_path: Path, **images: Any) -> Page:
    path = tmp_path / "out" / "report.html"
    write_report(folders, path, **images)
    return Page(path.read_text(encoding="utf-8"))
