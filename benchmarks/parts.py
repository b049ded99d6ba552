"""What a part of the benchmark is: sections that can be measured, and tables made from them."""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

# What a section measured, as it stands in its JSON file, with its environment.
Section = dict[str, Any]
Sections = dict[str, Section]
# A table or figure links on a page, from the sections that were measured.
View = Callable[[Sections, torch.device], str]
NOT_MEASURED = "*Not measured yet.*"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a section is measured with.

    Attributes:
        device: where.
        repeats: of each timing.
        folder: of the part's JSON files; sections may build on others that lie there.
    """

    device: torch.device
    repeats: int
    folder: Path


def no_time(section: str, device: torch.device) -> float:
    """The default of `Part.seconds`: nothing is known."""
    del section, device
    return 0.0


def never(section: str, setting: Setting) -> bool:
    """The default of `Part.stale`: a section that is there counts."""
    del section, setting
    return False


@dataclass(frozen=True)
class Figure:
    """A picture on the page: what it shows, how it is drawn, and whether there is enough for it."""

    text: str
    draw: Callable[[Sections, torch.device, Path], None]
    ready: Callable[[Sections], bool] = bool


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the benchmark.

    Attributes:
        sections: their names on a device, in the order in which they are measured.
        measure: one section, everything it knows ready for JSON. May raise `UnavailableError`.
        tables: by view; "" is the part's own. Given the sections that were measured.
        figures: by the file's stem; pages show them as the view "figures".
        kept: whether a section that is there already is not measured again.
        stale: whether it is measured again all the same, because others now speak against it.
        seconds: about how long a section takes, where that is known.
    """

    sections: Callable[[torch.device], list[str]]
    measure: Callable[[str, Setting], Section]
    tables: Mapping[str, View]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    kept: bool = False
    stale: Callable[[str, Setting], bool] = never
    seconds: Callable[[str, torch.device], float] = no_time


def place_of(device: torch.device) -> str:
    """The kind of hardware here, whose results are kept apart: "x86_64", "aarch64", "cuda"."""
    return platform.machine().lower() if device.type == "cpu" else device.type


def result_folder(part: str, place: str) -> str:
    """The name of the folder of a part's JSON files, which is also the name of its table."""
    return f"{part}-{place}"


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
