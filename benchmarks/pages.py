"""Tables and figures in README and docs, made from the JSON files: no figure is typed by hand.

A page marks where a table goes. Its name is that of the folder with the results, and where a part
has several tables, the view's:

    <!-- generated:product-cuda -->
    <!-- end:product-cuda -->
    <!-- generated:product-x86_64:models -->
    <!-- end:product-x86_64:models -->
"""

import importlib.util
import json
import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.catalogue import PARTS
from benchmarks.parts import NOT_MEASURED, Part, Sections, View, markdown, result_folder
from benchmarks.records import read_all
from krylov_descent.laboratory.exhibit_lines import MISSING, headings, lines
from krylov_descent.laboratory.figures import draw_convergence
from krylov_descent.laboratory.reproduce import Exhibit, exhibit

ROOT = Path(__file__).parents[1]
# The name under which pages ask for the tables of `ksd reproduce`.
EXHIBITS = "exhibit"
RESULTS = ROOT / "benchmarks" / "results"
FIGURE_VIEW = "figures"
FIGURES = Path("docs") / "benchmarks"
BLOCK = re.compile(
    r"^<!-- generated:(?P<name>[\w-]+)(?::(?P<view>[\w-]+))? -->\n"
    r".*?^<!-- end:(?P=name)(?(view):(?P=view)) -->$",
    re.DOTALL | re.MULTILINE,
)
START = re.compile(r"^<!-- generated:", re.MULTILINE)
# The files of what `ksd words` found, and what tables call the networks.
NETWORKS = {"ksd": "KSD", "hf": "HF", "lbfgs": "L-BFGS", "sgd": "SGD"}
# The kinds of hardware that pages have tables of.
PLACES = {
    "x86_64": torch.device("cpu"),
    "aarch64": torch.device("cpu"),
    "cuda": torch.device("cuda"),
}


def update(root: Path, results: Path, *, check: bool) -> int:
    """Bring tables and figures up to date, or only say which tables are not; the exit status."""
    outdated_pages = outdated(root, results)
    for page, text in outdated_pages.items():
        if not check:
            page.write_text(text, encoding="utf-8")
        print(f"{page.relative_to(root)}: {'out of date' if check else 'updated'}")
    if check and outdated_pages:
        print("Run `python -m benchmarks tables`.")
        return 1
    if not check:
        draw(root / FIGURES, results)
        for name in ("figure1", "figure2"):
            draw_exhibit(exhibit(name), ROOT / "results", root / "docs" / "results")
    return 0


def outdated(root: Path = ROOT, results: Path = RESULTS) -> dict[Path, str]:
    """Pages whose tables are not what the results say, each with the text that would be right."""
    pages = [*root.glob("README.md"), *sorted(root.glob("docs/**/*.md"))]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    filled = {page: fill(text, results, page.name) for page, text in texts.items()}
    return {page: filled[page] for page, text in texts.items() if filled[page] != text}


def fill(text: str, results: Path, page: str = "the page") -> str:
    """The text with every table made anew; it says so where there is no result yet."""
    if len(START.findall(text)) != len(BLOCK.findall(text)):
        raise ValueError(f"{page} has a `<!-- generated:NAME -->` without its `<!-- end:NAME -->`")

    def block(match: re.Match[str]) -> str:
        name, view = match["name"], match["view"] or ""
        if name == EXHIBITS:
            base = ROOT / "results"
            body = OTHERS[view](base) if view in OTHERS else exhibit_table(exhibit(view), base)
            return f"<!-- generated:{name}:{view} -->\n\n{body}\n\n<!-- end:{name}:{view} -->"
        part, place = _part_and_place(name, page)
        views: dict[str, View] = dict(part.tables)
        if part.figures:
            views[FIGURE_VIEW] = partial(links, part, place)
        if view not in views:
            known = ", ".join(filter(None, views)) or "none"
            raise ValueError(f"{page} asks for the view {view!r} of {name}; there are {known}")
        sections = read_all(results / name)
        body = views[view](sections, PLACES[place]) if sections else NOT_MEASURED
        mark = f"{name}:{view}" if view else name
        return f"<!-- generated:{mark} -->\n\n{body}\n\n<!-- end:{mark} -->"

    return BLOCK.sub(block, text)


def exhibit_table(shown: Exhibit, base: Path) -> str:
    """A table of the paper as Markdown, and below it what was not run."""
    head, not_run, row = headings(shown), dict[str, list[str]](), ""
    text = [f"| | {' | '.join(head)} |", "| --- |" + " ---: |" * len(head)]
    waiting: list[str] = []  # the heading of a row, until a line comes below it
    for name, *columns in lines(shown, base):
        if columns == [MISSING]:
            not_run.setdefault(name, []).append(row)
            continue
        row, title = (row, name) if columns else (name, f"**{name}**")
        cells = [title, *columns, *([""] * (len(head) - len(columns)))]
        line = f"| {' | '.join(cells)} |"
        if columns:
            text += [*waiting, line]
        waiting = [] if columns else [line]
    if not_run:
        of_rows = (f"{name} on {', '.join(rows)}" for name, rows in not_run.items())
        text += ["", f"Not run: {'; '.join(of_rows)}."]
    return "\n".join(text)


def frames_table(base: Path) -> str:
    """The frame errors of the networks on speech at each noise level, as Markdown."""
    return _by_noise({name: (rows, "frame") for name, rows in _recognised(base).items()})


def words_table(base: Path) -> str:
    """The word errors that `ksd words` found with the networks on speech, as Markdown."""
    found = _recognised(base)
    columns = {
        f"{system}, {name}": (rows, system.lower())
        for system in ("Hybrid", "Tandem")
        for name, rows in found.items()
    }
    if found:  # without a network, so the same in all of them
        columns["MFCC alone"] = (next(iter(found.values())), "mfcc")
    return _by_noise(columns)


def _recognised(base: Path) -> dict[str, list[dict[str, Any]]]:
    """What `ksd words` found with networks of earlier runs on speech, by optimiser."""
    paths = {name: base / "trials" / "words" / f"{stem}.json" for stem, name in NETWORKS.items()}
    return {
        name: json.loads(path.read_text(encoding="utf-8"))["conditions"]
        for name, path in paths.items()
        if path.exists()
    }


def _by_noise(columns: dict[str, tuple[list[dict[str, Any]], str]]) -> str:
    """One line for each noise level; a column is rows and which of their numbers to show."""
    if not columns:
        return NOT_MEASURED
    text = [f"| noise | {' | '.join(columns)} |", "| --- |" + " ---: |" * len(columns)]
    for level in zip(*(rows for rows, _ in columns.values()), strict=True):
        snr = level[0]["snr"]
        errors = (
            f"{100 * row[key]:.2f}%" for row, (_, key) in zip(level, columns.values(), strict=True)
        )
        text.append(f"| {'clean' if snr is None else f'{snr:g} dB'} | {' | '.join(errors)} |")
    return "\n".join(text)


def sets_table(base: Path) -> str:
    """Single steps of KSD with the paper's settings and other sets, as Markdown."""
    path = base / "trials" / "paper_settings.json"
    points = json.loads(path.read_text(encoding="utf-8"))["points"]
    heads = [f"after {p['after_steps']} steps: decrease on C, on all images" for p in points]
    rows = [["a step with", *heads, "passes"]]
    for name in points[0]["variants"]:
        steps = [point["variants"][name] for point in points]
        pairs = [
            f"{_mean(of_point, 'decrease_on_C'):.2g}, {_mean(of_point, 'decrease_on_all'):.2g}"
            for of_point in steps
        ]
        rows.append([name, *pairs, f"{_mean(steps[0], 'passes'):.1f}"])
    return f"{markdown(rows)}\n\nMeans of two steps with other samples each."


def _mean(steps: list[dict[str, float]], key: str) -> float:
    return statistics.fmean(step[key] for step in steps)


# Views of `exhibit` that are no exhibits.
OTHERS = {"frames": frames_table, "words": words_table, "sets": sets_table}


def draw_exhibit(shown: Exhibit, base: Path, folder: Path) -> None:
    """A figure of the paper, from the runs that are there."""
    folders = {cell.column: cell.folder(base) for cell in shown.cells}
    runs = {column: folder for column, folder in folders.items() if folder.started}
    path = folder / f"{shown.name}.png"
    draw_convergence(runs, path, title=shown.title, error="training error")


def links(part: Part, place: str, sections: Sections, device: torch.device) -> str:
    """The figures of a part on docs/benchmarks.md."""
    del device
    return "\n\n".join(
        f"![{figure.text}](benchmarks/{stem}-{place}.svg)"
        for stem, figure in part.figures.items()
        if figure.ready(sections)
    )


def draw(folder: Path, results: Path) -> None:
    """All figures for which there are results; none where matplotlib is not installed."""
    drawable = [
        (figure, sections, device, folder / f"{stem}-{place}.svg")
        for name, part in PARTS.items()
        for place, device in PLACES.items()
        if (sections := read_all(results / result_folder(name, place)))
        for stem, figure in part.figures.items()
        if figure.ready(sections)
    ]
    if drawable and importlib.util.find_spec("matplotlib") is None:
        print("figures skipped: matplotlib is not installed")
        return
    for figure, sections, device, path in drawable:
        folder.mkdir(parents=True, exist_ok=True)
        figure.draw(sections, device, path)


def _part_and_place(name: str, page: str) -> tuple[Part, str]:
    for part in PARTS:
        for place in PLACES:
            if result_folder(part, place) == name:
                return PARTS[part], place
    raise ValueError(
        f"{page} asks for a table {name!r}; there are {', '.join(PARTS)}, each with "
        f"{', '.join(f'-{place}' for place in PLACES)}"
    )
