"""The report in headless Chromium: downloads, seeds as bands, folded sections, no scripts."""

import base64
import csv
import json
from io import BytesIO, StringIO
from pathlib import Path
from xml.etree import ElementTree as ET

import matplotlib.image
import numpy as np
import pytest

from krylov_descent.laboratory.report import write_report
from tests.laboratory.browser import chromium, needs_chromium, visit, visited
from tests.laboratory.example_runs import AUTOENCODER, config, rows, write_run

pytestmark = needs_chromium

# Each download as its name, its media type and what is in it.
DOWNLOADS = """
const blobs = new Map();
URL.createObjectURL = (blob) => (blobs.set("blob:" + blobs.size, blob), [...blobs.keys()].at(-1));
const saved = [];
HTMLAnchorElement.prototype.click = function () {
  const read = new FileReader();
  read.onload = () => {
    saved.push([this.download, read.result]);
    document.body.dataset.seen = JSON.stringify(saved).replaceAll('"', "~");
  };
  read.readAsDataURL(blobs.get(this.href));
};
for (const button of document.querySelectorAll("figure.curves .downloads button")) button.click();
"""
BANDS = """
const chart = document.querySelector("svg.chart");
const area = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: area.left + 0.3 * area.width }));
const seen = {
  bands: chart.querySelectorAll("path.band").length,
  legend: [...document.querySelectorAll(".legend button")].map((button) => button.textContent),
  tooltip: [...document.querySelectorAll(".tooltip p")].map((line) => line.textContent),
};
document.querySelector('input[value="iteration"]').click();
seen.overIterations = chart.querySelectorAll("path.band").length;
document.body.dataset.seen = JSON.stringify(seen);
"""
FOLDED = """
const drawn = (where) => where.querySelectorAll("svg.chart .cursor").length; // by the script
const seen = { folded: document.documentElement.scrollHeight, before: drawn(document) };
const link = document.querySelectorAll(".overview a")[2];
const section = document.querySelector(link.hash).closest("details");
link.click();
setTimeout(() => {
  seen.open = [...document.querySelectorAll("details.fold:not(.part)")].map((fold) => fold.open);
  seen.after = drawn(section);
  seen.top = document.querySelector(link.hash).getBoundingClientRect().top;
  document.body.dataset.seen = JSON.stringify(seen);
}, 1000);
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three seeds of one method, two of another."""
    root = tmp_path_factory.mktemp("seeds")
    folders = [
        write_run(
            root / f"{name}-{seed}",
            config(name, f'{name}, "second"' if name == "hf" else name, seed=seed),
            rows(name, steps=30, floor=floor * (1 + 0.1 * seed), rate=5 + seed),
        )
        for name, floor, seeds in (("ksd", 0.1, 3), ("hf", 0.2, 2))
        for seed in range(seeds)
    ]
    write_report(folders, root / "report.html")
    return root / "report.html"


def test_figures_and_numbers_are_saved_from_the_page(page: Path) -> None:
    found = visit(visited(page, DOWNLOADS))
    assert (found.console, found.requests) == ([], [])
    text = found.dom.partition('data-seen="')[2].partition('"')[0].replace("~", '"')
    files = {}
    for name, url in json.loads(text):
        head, _, body = url.partition(",")
        files[name.rpartition(".")[2]] = (name, head, base64.b64decode(body))
    assert {name for name, _, _ in files.values()} == {
        f"curves-re-created-curves.{kind}" for kind in ("svg", "png", "csv", "json")
    }
    drawing = ET.fromstring(files["svg"][2].decode())
    paths = [p for p in drawing.iter("{http://www.w3.org/2000/svg}path") if p.get("style")]
    kinds = [str(path.get("class")).split()[0] for path in paths]
    assert kinds.count("curve") == kinds.count("band") == 2
    curve = paths[kinds.index("curve")]
    assert "stroke: rgb(0, 101, 179)" in str(curve.get("style"))  # by itself, without the page
    pixels = matplotlib.image.imread(BytesIO(files["png"][2]), format="png")
    assert pixels.shape[1] == 2 * float(drawing.get("width") or 0)
    blue = np.array([0, 101, 179]) / 255
    assert (np.abs(pixels[..., :3] - blue).max(-1) < 0.02).sum() > 500
    table = list(csv.DictReader(StringIO(files["csv"][2].decode())))
    assert len(table) == 5 * 31
    assert table[40]["method"] == "ksd"
    assert {row["method"] for row in table} == {"ksd", 'hf, "second"'}
    mine = [row for row in table if (row["method"], row["seed"]) == ("ksd", "1")]
    metrics = rows("ksd", steps=30, floor=0.1 * 1.1, rate=6)
    for key in ("seconds", "passes", "train", "validation", "test"):
        assert [float(row[key]) for row in mine] == pytest.approx(
            [row[key] for row in metrics], rel=1e-4
        )
    data = json.loads(files["json"][2])
    assert [method["label"] for method in data["methods"]] == ["ksd", 'hf, "second"']


def test_seeds_are_a_band(page: Path) -> None:
    found = visit(visited(page, BANDS))
    assert found.console == []
    seen = found.seen
    assert seen["bands"] == seen["overIterations"] == 2
    assert seen["legend"] == ["ksd (3 seeds)", "hf, ~ (2 seeds)".replace("~", '"second"')]
    assert seen["tooltip"][1].count(" – ") == 1


def test_many_problems_are_folded_and_a_link_opens_one(tmp_path: Path) -> None:
    folders = [
        write_run(
            tmp_path / f"p{number}",
            config(problem={**AUTOENCODER, "options": {"code_size": number}}),
            rows(steps=20),
        )
        for number in range(12)
    ]
    write_report(folders, tmp_path / "report.html")
    found = visit(visited(tmp_path / "report.html", FOLDED))
    assert found.console == []
    seen = found.seen
    assert seen["folded"] < 2500
    assert seen["before"] == 0
    assert seen["open"] == [number == 2 for number in range(12)]
    assert seen["after"] == 2
    assert abs(seen["top"]) < 100


def test_curves_are_there_without_scripts(page: Path) -> None:
    plain, picture = page.with_name("plain.html"), page.with_name("plain.png")
    whole = page.read_text()
    assert whole.count("<script>") == 1
    plain.write_text(whole.partition("<script>")[0])
    chromium(
        plain,
        "--blink-settings=preferredColorScheme=1",
        "--window-size=1280,1000",
        f"--screenshot={picture}",
    )
    pixels = matplotlib.image.imread(picture)[..., :3]
    for colour in ((0, 101, 179), (209, 72, 10)):
        near = np.abs(pixels - np.array(colour) / 255).max(-1) < 0.02
        assert near.sum() > 300
