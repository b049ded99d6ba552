"""The JSON files: one per section, written when it is done."""

import json
from pathlib import Path

from benchmarks.parts import Section, Sections


def write(path: Path, section: Section) -> None:
    """Whole or not at all: an interruption leaves no half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(section, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def read(path: Path) -> Section:
    """What a section measured."""
    section: Section = json.loads(path.read_text(encoding="utf-8"))
    return section


def read_all(folder: Path) -> Sections:
    """All sections of a part that were measured, by name."""
    return {path.stem: read(path) for path in sorted(folder.glob("*.json"))}
