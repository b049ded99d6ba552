"""The whole page: every part of the report, with styles and scripts inside it."""

import re
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TypeVar

import krylov_descent
from krylov_descent.laboratory.record import RunFolder, RunFolderError
from krylov_descent.laboratory.report.charts import chart_json
from krylov_descent.laboratory.report.fields import Field, field_figure
from krylov_descent.laboratory.report.pictures import Reconstructions, reconstruction_figure
from krylov_descent.laboratory.report.reading import read_run
from krylov_descent.laboratory.report.runs import Comparison, Run, compare
from krylov_descent.laboratory.report.summary import summarize
from krylov_descent.laboratory.report.tables import (
    results_table,
    settings_table,
    terms_table,
    time_bars,
)

SCRIPTS = ("scales.js", "chart.js", "page.js")
FOLDERS_NOTE = (
    '<p class="note">A run is recorded under runs/, by its problem, optimiser and seed; --folder '
    "names another place.</p>"
)
Picture = Reconstructions | Field
Shown = TypeVar("Shown", Reconstructions, Field)
# (heading, HTML); a part without HTML is left out.
Part = tuple[str, str]


def write_report(
    folders: Sequence[RunFolder],
    path: Path,
    *,
    pictures: Mapping[Path, Picture] | None = None,
) -> dict[Path, str]:
    """Write run folders as one HTML page that makes no request when it is opened.

    Args:
        folders: the runs, of one problem or several; those of one problem are compared. A folder
            without a run is shown as missing, a run that has not ended as unfinished, one whose
            record is not whole as damaged.
        path: the page; its folder is made, and a page that is there is replaced.
        pictures: for the folders (by their path) that have some.

    Returns:
        what is damaged, by the path of the folder.

    Raises:
        ValueError: no folders, or pictures of a folder that is not among them.
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
    comparisons = compare(runs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_page(comparisons, images), encoding="utf-8")
    except OSError as problem:
        raise RunFolderError(
            f"the report {path} cannot be written: {problem.strerror}"
        ) from problem
    return {run.folder.path: run.damaged for run in runs if run.damaged}


def _page(comparisons: list[Comparison], images: Mapping[Path, Picture]) -> str:
    alone = len(comparisons) == 1
    title = comparisons[0].heading if alone else _several(comparisons)
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        version=escape(krylov_descent.__version__),
        style=_asset("page.css"),
        script="".join(map(_asset, SCRIPTS)),
        contents=_contents(comparisons, images),
        sections="".join(
            _section(number, comparison, images, alone)
            for number, comparison in enumerate(comparisons, 1)
        ),
    )


def _several(comparisons: list[Comparison]) -> str:
    """How many problems there are; a problem with other options is another form of it."""
    titles = [comparison.title for comparison in comparisons if comparison.runs[0].config]
    problems = len(set(titles))
    counted = f"{problems} problem{'' if problems == 1 else 's'}"
    return counted if problems == len(titles) else f"{counted} in {len(titles)} forms"


def _section(
    number: int, comparison: Comparison, images: Mapping[Path, Picture], alone: bool
) -> str:
    """All about one problem; its title is the page's where it is the only one."""
    level = 2 if alone else 3
    heading = "" if alone else f'<h2 id="problem-{number}">{escape(comparison.heading)}</h2>'
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
    parts = "".join(
        f'<section><h{level} id="{_anchor(number, name)}">{name}</h{level}>{html}</section>'
        for name, html in _parts(comparison, images)
    )
    data = f'<script type="application/json" class="data">{chart_json(comparison)}</script>'
    return (
        f'<section class="problem">{heading}<div class="summary">{sentences}</div>{parts}{data}'
        "</section>"
    )


def _parts(comparison: Comparison, images: Mapping[Path, Picture]) -> list[Part]:
    runs = comparison.runs
    strips, fields = _pictures_of(runs, images, Reconstructions), _pictures_of(runs, images, Field)
    parts = [
        ("Results", results_table(comparison) + _results_note(comparison)),
        ("Convergence", _figure("curves") if any(run.rows for run in runs) else ""),
        ("Reconstructions", reconstruction_figure(strips) if strips else ""),
        ("Solution", field_figure(fields) if fields else ""),
        ("Terms", terms_table(runs)),
        ("Ritz values", _figure("ritz") if any(map(_has_ritz_values, runs)) else ""),
        ("Where the time went", time_bars(runs)),
        ("How to run it again", _commands(runs)),
        (
            "Settings and environment",
            settings_table(runs) if any(run.config for run in runs) else "",
        ),
    ]
    return [(name, html) for name, html in parts if html]


def _pictures_of(
    runs: list[Run], images: Mapping[Path, Picture], kind: type[Shown]
) -> list[tuple[int, str, Shown]]:
    """The pictures of one kind, each with the index and the label of its run."""
    found = [(i, run.label, images.get(run.folder.path)) for i, run in enumerate(runs)]
    return [(i, label, picture) for i, label, picture in found if isinstance(picture, kind)]


def _contents(comparisons: list[Comparison], images: Mapping[Path, Picture]) -> str:
    if len(comparisons) == 1:
        links = [(_anchor(1, name), name) for name, _ in _parts(comparisons[0], images)]
    else:
        links = [(f"problem-{n}", c.heading) for n, c in enumerate(comparisons, 1)]
    return "".join(f'<li><a href="#{anchor}">{escape(name)}</a></li>' for anchor, name in links)


def _results_note(comparison: Comparison) -> str:
    percent = ", in per cent" if comparison.unit == "%" else ""
    note = (
        f"Errors are the {comparison.metric}{percent}. The first three are those of the iteration "
        "with the lowest validation error; without a validation set, of the last one. Time is that "
        "of the steps, without measuring. "
    )
    if comparison.reference is not None:
        note += (
            "Relative time in all is that of each to its own early stop, and left open where a "
            "limit ended one of the two; relative time to the same error is the time to the worse "
            "of the two final training errors, and left open where that is more than half of the "
            "error at the start."
        )
    return f'<p class="note">{escape(note)}</p>'


def _figure(kind: str) -> str:
    """An empty figure for page.js to fill."""
    return (
        f'<figure class="{kind}"><noscript>This figure is drawn by a script, which is switched '
        "off; the numbers are in the table above.</noscript></figure>"
    )


def _has_ritz_values(run: Run) -> bool:
    return any(row.get("ritz_values") for row in run.rows)


def _commands(runs: list[Run]) -> str:
    items = []
    for run in runs:
        lines = [line for line in (_command(run), _resume_command(run)) if line]
        if lines:
            code = _words("\n".join(lines))
            items.append(
                f"<li><p><b>{escape(run.label)}</b></p><pre><code>{code}</code></pre></li>"
            )
    return f'<ul class="commands">{"".join(items)}</ul>{FOLDERS_NOTE}' if items else ""


def _command(run: Run) -> str:
    """The shell line that makes the run, but not in its folder, which is taken."""
    words = shlex.split(run.config.get("command", ""))
    if "--folder" in words:
        at = words.index("--folder")
        del words[at : at + 2]
    return shlex.join(words)


def _words(code: str) -> str:
    """Each word as an element, for the style to break lines between them and not at hyphens."""
    return re.sub(r"\S+", lambda word: f"<span>{escape(word[0])}</span>", code)


def _resume_command(run: Run) -> str:
    """How to go on with a run that has not ended, where it left something to go on from."""
    if run.state != "unfinished" or not run.folder.checkpoint.exists():
        return ""
    return f"# to go on where it is:\nksd train --resume {shlex.quote(str(run.folder.path))}"


def _anchor(number: int, name: str) -> str:
    return f"{name.lower().replace(' ', '-')}-{number}"


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
