"""The whole page: every part of the report, with styles and scripts inside it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TypeVar

import krylov_descent
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.report.charts import chart_json, has_ritz_values
from krylov_descent.laboratory.report.commands import commands
from krylov_descent.laboratory.report.comparison import Comparison, compare
from krylov_descent.laboratory.report.drawing import convergence_svg
from krylov_descent.laboratory.report.fields import Field, field_figure
from krylov_descent.laboratory.report.methods import Method
from krylov_descent.laboratory.report.overview import overview
from krylov_descent.laboratory.report.pictures import Reconstructions, reconstruction_figure
from krylov_descent.laboratory.report.reading import read_run
from krylov_descent.laboratory.report.runs import Run
from krylov_descent.laboratory.report.settings import settings_table
from krylov_descent.laboratory.report.summary import summarize
from krylov_descent.laboratory.report.tables import (
    published_table,
    results_note,
    results_table,
    runs_table,
    terms_table,
)
from krylov_descent.laboratory.report.times import time_bars

SCRIPTS = ("scales.js", "chart.js", "downloads.js", "page.js")
# Where the new runs go when everything is run again.
AGAIN = Path("runs") / "again"
# With more problems than this the sections are folded, with more runs the details of a problem.
MOST_PROBLEMS_OPEN, MOST_RUNS_OPEN = 2, 8
NEEDS_SCRIPT = "<noscript>This figure is drawn by a script, which is switched off.</noscript>"
Picture = Reconstructions | Field
Shown = TypeVar("Shown", Reconstructions, Field)


@dataclass(frozen=True)
class Part:
    """A piece of a section; one that is folded is opened on demand."""

    name: str
    html: str
    folded: bool = False


def write_report(
    folders: Sequence[RunFolder],
    path: Path,
    *,
    pictures: Mapping[Path, Picture] | None = None,
    target: float | None = None,
) -> dict[Path, str]:
    """Write run folders as one HTML page that makes no request when it is opened.

    Args:
        folders: the runs, of one problem or several; those of one problem are compared, and those
            that differ in their seed alone are one method. A folder without a run is shown as
            missing, a run that has not ended as unfinished, one whose record is not whole as
            damaged.
        path: the page; its folder is made, and a page that is there is replaced at once: whoever
            reads it has the old one or the new one.
        pictures: for the folders (by their path) that have some.
        target: the test error that the time is counted to, in the problem's metric; by default one
            that half of the methods reach.

    Returns:
        what is damaged, by the path of the folder.

    Raises:
        ValueError: no folders, pictures of a folder that is not among them, or a target for
            several problems.
        RunFolderError: the page cannot be written.
    """
    images = dict(pictures or {})
    if not folders:
        raise ValueError("`folders` is empty: name at least one run folder")
    if unknown := set(images) - {folder.path for folder in folders}:
        raise ValueError(
            f"`pictures` has some of {min(map(str, unknown))}, which is not among "
            "`folders`: use the folders' paths as keys"
        )
    runs = list(map(read_run, folders))
    page = _page(compare(runs, target), images, target)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_text(page, encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as problem:
        raise RunFolderError(
            f"the report {path} cannot be written: {problem.strerror}"
        ) from problem
    return {run.folder.path: run.damaged for run in runs if run.damaged}


def _page(
    comparisons: list[Comparison], images: Mapping[Path, Picture], target: float | None
) -> str:
    alone = len(comparisons) == 1
    anchors = [f"problem-{number}" for number in range(1, len(comparisons) + 1)]
    if alone:
        parts = _parts(comparisons[0], images, AGAIN, target)
        title, body = comparisons[0].heading, _section(comparisons[0], parts, anchors[0], 2)
        links = [(_anchor(anchors[0], part), part.name) for part in parts]
    else:
        title, links = _several(comparisons), [("overview", "Overview")]
        body = overview(comparisons, anchors) + "".join(
            _folded_section(
                comparison,
                _parts(comparison, images, AGAIN / anchor, target),
                anchor,
                folded=len(comparisons) > MOST_PROBLEMS_OPEN,
            )
            for comparison, anchor in zip(comparisons, anchors, strict=True)
        )
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        version=escape(krylov_descent.__version__),
        style=_asset("page.css"),
        script="".join(map(_asset, SCRIPTS)),
        contents="".join(f'<li><a href="#{at}">{escape(name)}</a></li>' for at, name in links),
        sections=body,
    )


def _several(comparisons: list[Comparison]) -> str:
    """How many problems there are; a problem with other options is another form of it."""
    titles = [c.title for c in comparisons if any(run.config for run in c.runs)]
    problems = len(set(titles))
    counted = f"{problems} problem{'' if problems == 1 else 's'}"
    return counted if problems == len(titles) else f"{counted} in {len(titles)} forms"


def _folded_section(comparison: Comparison, parts: list[Part], anchor: str, folded: bool) -> str:
    """A problem among others; the anchor is inside, where a link to it opens the section."""
    heading = f"<h2>{escape(comparison.heading)}</h2>"
    return (
        f'<details class="fold"{"" if folded else " open"}><summary>{heading}</summary>'
        f'<div id="{anchor}">{_section(comparison, parts, anchor, 3)}</div></details>'
    )


def _section(comparison: Comparison, parts: list[Part], anchor: str, level: int) -> str:
    """All about one problem."""
    summary = summarize(comparison)
    sentences = "".join(
        f'<p class="{kind}">{escape(text)}</p>'
        for kind, text in (
            ("headline", summary.headline),
            ("details", " ".join(summary.details)),
            ("caveats", " ".join(summary.caveats)),
        )
        if text
    )
    data = f'<script type="application/json" class="data">{chart_json(comparison)}</script>'
    inside = "".join(_part(part, anchor, level) for part in parts)
    return (
        f'<section class="problem"><div class="summary">{sentences}</div>{inside}{data}</section>'
    )


def _part(part: Part, anchor: str, level: int) -> str:
    at, heading = _anchor(anchor, part), f"<h{level}>{part.name}</h{level}>"
    if part.folded:
        return (
            f'<details class="fold part"><summary>{heading}</summary>'
            f'<div id="{at}">{part.html}</div></details>'
        )
    return f'<section id="{at}">{heading}{part.html}</section>'


def _parts(
    comparison: Comparison, images: Mapping[Path, Picture], again: Path, target: float | None
) -> list[Part]:
    methods = comparison.methods
    strips = _pictures_of(methods, images, Reconstructions)
    fields = _pictures_of(methods, images, Field)
    many = len(comparison.runs) > MOST_RUNS_OPEN
    drawn = any(method.counted for method in methods)
    parts = [
        Part("Convergence", _figure("curves", convergence_svg(comparison)) if drawn else ""),
        Part("Results", results_table(comparison) + results_note(comparison)),
        Part("Every run", runs_table(comparison), folded=True),
        Part("Published results", published_table(comparison)),
        Part("How to run it again", commands(comparison, again, target)),
        Part("Reconstructions", reconstruction_figure(strips) if strips else ""),
        Part("Solution", field_figure(fields) if fields else ""),
        Part("Terms", terms_table(methods), many),
        Part(
            "Ritz values",
            _figure("ritz", NEEDS_SCRIPT) if has_ritz_values(comparison) else "",
            many,
        ),
        Part("Where the time went", time_bars(methods), many),
        Part("Settings and environment", settings_table(methods), folded=True),
    ]
    return [part for part in parts if part.html]


def _pictures_of(
    methods: list[Method], images: Mapping[Path, Picture], kind: type[Shown]
) -> list[tuple[str, str, Shown]]:
    """The pictures of one kind, of each method's first run that has one, with style and label."""

    def picture(run: Run) -> Shown | None:
        there = images.get(run.folder.path)
        return there if isinstance(there, kind) else None

    found = [(method.style, method.first_with(picture)) for method in methods]
    return [(style, named[0], named[1]) for style, named in found if named is not None]


def _figure(kind: str, inside: str) -> str:
    """A figure that page.js fills; `inside` is there until then."""
    return f'<figure class="{kind}">{inside}</figure>'


def _anchor(section: str, part: Part) -> str:
    return f"{section}-{part.name.lower().replace(' ', '-')}"


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
