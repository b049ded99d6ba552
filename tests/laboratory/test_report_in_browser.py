"""The report in headless Chromium: what is drawn, what the controls do, phone, dark, print."""

import re
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from krylov_descent.laboratory.report import Reconstructions, write_report
from tests.laboratory.browser import chromium, needs_chromium, visit, visited
from tests.laboratory.example_runs import (
    CLASSIFIER,
    config,
    curve_images,
    rows,
    write_comparison,
    write_run,
)

pytestmark = needs_chromium

# What a person does, and what the page then shows. Each line of the answer is checked below.
VISIT = """
const seen = {};
const curves = document.querySelector("figure.curves");
const chart = curves.querySelector("svg.chart");
const paths = () => [...chart.querySelectorAll("path.curve")].map((path) => path.getAttribute("d"));
const labels = () => [...chart.querySelectorAll("text")].map((text) => text.textContent);
const area = chart.getBoundingClientRect();
const pointer = (kind, share, target = chart) => target.dispatchEvent(new PointerEvent(kind, {
  clientX: area.left + share * area.width, clientY: area.top + 100, button: 0, bubbles: true,
}));
const choose = (value) => curves.querySelector(`input[value="${value}"]`).click();
const tooltip = curves.querySelector(".tooltip");

seen.curves = paths().length;
seen.references = labels().filter((text) => text.includes("published"));
const start = paths();
const corners = (path) => path.split(/[ML]/).map((pair) => pair.replace("h0", "").split(" "));
const isStairs = (path) => corners(path).slice(1).every(
  ([x, y], i, all) => i === 0 || x === all[i - 1][0] || y === all[i - 1][1],
);
seen.stairs = start.every(isStairs);
seen.names = [...chart.querySelectorAll(".label")].map((text) => text.textContent);
seen.target = labels().filter((text) => text.startsWith("target"));
pointer("pointermove", 0.3);
seen.tooltip = [...tooltip.querySelectorAll("p")].map((line) => line.textContent);
pointer("pointerdown", 0.2);
pointer("pointermove", 0.5);
seen.selection = chart.querySelectorAll(".selection").length;
pointer("pointerup", 0.5);
seen.zoomed = paths().join() !== start.join();
seen.resetShown = !curves.querySelector(".reset").hidden;
chart.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
seen.doubleClickResets = paths().join() === start.join();
pointer("pointerdown", 0.2);
pointer("pointerup", 0.5);
curves.querySelector(".reset").click();
seen.buttonResets = paths().join() === start.join();
pointer("pointerdown", 0.4);
pointer("pointerup", 0.4);
chart.dispatchEvent(new PointerEvent("pointerleave", { pointerType: "touch" }));
seen.tapShowsValues = !tooltip.hidden;
pointer("pointerdown", 0, document.body);
seen.tapElsewhereHides = tooltip.hidden;
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
seen.keyShowsValues = !tooltip.hidden;
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "+", bubbles: true }));
seen.keyZooms = paths().join() !== start.join();
chart.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));

choose("iteration");
seen.overIterations = labels().includes("iterations") && paths().join() !== start.join();
choose("seconds");
choose("train");
seen.trainTarget = labels().some((text) => text.startsWith("target"));
seen.train = labels().some((text) => text.startsWith("train error"));
seen.trainReferences = labels().filter((text) => text.includes("published")).length;
choose("test");
choose("linear");
seen.linear = paths().join() !== start.join() && labels().includes("0");
choose("log");
curves.querySelector(".legend button").click();
seen.withoutOne = paths().length;
curves.querySelector(".legend button").click();
seen.asBefore = paths().join() === start.join();

const fan = document.querySelector("figure.ritz");
seen.fan = fan.querySelectorAll("path.curve").length;
seen.fanTicks = [...fan.querySelectorAll("text")].map((text) => text.textContent);
seen.fanChoices = fan.querySelectorAll("input").length;
seen.images = [...document.images].every((image) => image.naturalWidth === 12 * 30 - 2);
const paper = () => getComputedStyle(document.body).backgroundColor;
seen.light = paper();
document.getElementById("theme").click();
seen.dark = paper();
seen.theme = document.getElementById("theme").textContent;
document.body.dataset.seen = JSON.stringify(seen);
"""
# A phone: headless windows are never so narrow, frames are. The frame tells its own width.
PHONE = """<body><iframe src="visited.html" style="width:390px;height:800px"></iframe>
<script>onmessage = (event) => (document.body.dataset.seen = event.data);</script>"""
WIDTHS = """
const wide = document.documentElement.scrollWidth;
const chart = document.querySelector("svg.chart").getBoundingClientRect();
parent.postMessage(JSON.stringify({ inner: innerWidth, wide, chart: chart.width }), "*");
"""
# Tables that do not fit, lines of the first command, and its words that lie on two lines.
LAPTOP = """
document.querySelectorAll("details").forEach((details) => (details.open = true));
const tables = [...document.querySelectorAll(".scroll")];
const code = document.querySelector("code");
const isCut = (table) => table.scrollWidth > table.clientWidth;
const onTwoLines = (word) => word.getClientRects().length > 1;
document.body.dataset.seen = JSON.stringify({
  cut: tables.filter(isCut).map((table) => table.ariaLabel),
  lines: code.getClientRects().length,
  brokenWords: [...code.children].filter(onTwoLines).map((word) => word.textContent),
});
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    folders, images = write_comparison(root), curve_images()
    pictures = {folder.path: Reconstructions(images, 0.9 * images) for folder in folders[:2]}
    write_report(folders, root / "report.html", pictures=pictures)
    return root / "report.html"


def test_figures_and_controls(page: Path) -> None:
    found = visit(visited(page, VISIT))
    assert found.console == []
    assert found.requests == []
    seen = found.seen
    assert seen["curves"] == 5
    assert seen["references"] == ["HF, published: 0.19", "KSD, published: 0.25"]
    assert seen["stairs"]
    assert seen["names"][0] == "L-BFGS"  # from the top
    assert sorted(seen["names"])[1:3] == ["HF", "KSD (dimension 20, curvat…"]
    assert seen["target"] == ["target 0.25"]
    assert not seen["trainTarget"]  # it is a test error
    assert re.fullmatch(r"\d\d(\.\d)? seconds", seen["tooltip"][0])
    assert len(seen["tooltip"]) == 6
    assert "KSD (dimension 20" in seen["tooltip"][1]  # the lowest error comes first
    assert seen["selection"] == 1
    for what in ("zoomed", "resetShown", "doubleClickResets", "buttonResets"):
        assert seen[what], what
    for what in ("tapShowsValues", "tapElsewhereHides", "keyShowsValues", "keyZooms"):
        assert seen[what], what
    for what in ("overIterations", "train", "linear", "asBefore"):
        assert seen[what], what
    assert seen["trainReferences"] == 3
    assert seen["withoutOne"] == 4
    assert seen["fan"] == 21
    assert {"0", "−1", "1"} <= set(seen["fanTicks"])
    assert seen["fanChoices"] == 2
    assert seen["images"]
    assert (seen["light"], seen["dark"]) == ("rgb(255, 255, 255)", "rgb(20, 24, 29)")
    assert seen["theme"] == "Light"


def test_errors_and_requests_would_be_noticed(tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://example.invalid/a.png"><script>nothing.there</script>')
    found = visit(bad)
    assert any("nothing is not defined" in line for line in found.console)
    assert found.requests == ["http://example.invalid/a.png"]


def test_zeros_gaps_and_a_run_that_has_just_begun(tmp_path: Path) -> None:
    perfect = rows(first=0.9, floor=0.0, rate=15)
    for row in perfect[60:]:
        row |= {"train": 0.0, "validation": 0.0, "test": 0.0}
    broken = rows("hf", first=0.9, floor=0.02)
    for row in broken[50:60]:
        row["test"] = float("nan")
    folders = [
        write_run(tmp_path / "ksd", config(problem=CLASSIFIER), perfect),
        write_run(tmp_path / "hf", config("hf", "HF", problem=CLASSIFIER), broken),
        write_run(tmp_path / "new", config("x", "X", problem=CLASSIFIER), rows()[:1], ending=None),
    ]
    write_report(folders, tmp_path / "report.html")
    found = visit(tmp_path / "report.html")
    assert found.console == []
    paths = re.findall(r'<path class="curve colour[^"]*" d="([^"]*)"', found.dom)
    assert len(paths) == 3
    assert [path.count("M") for path in paths] == [1, 2, 1]
    assert not re.search("NaN|Infinity|undefined", "".join(paths))
    assert "test error in %" in found.dom


def test_phone_needs_no_sideways_scrolling(page: Path) -> None:
    visited(page, WIDTHS)
    phone = page.with_name("phone.html")
    phone.write_text(PHONE)
    seen = visit(phone).seen
    assert seen["inner"] == 390
    assert seen["wide"] == 390
    assert 340 < seen["chart"] < 390


def test_laptop_shows_whole_tables_and_whole_words(tmp_path: Path) -> None:
    folders = []
    for name, title in (("ksd-paper", "KSD (paper)"), ("hf", "HF"), ("ncg", "Nonlinear CG")):
        configuration = config(name, title, problem=CLASSIFIER, curvature="hessian")
        configuration["command"] = "ksd train" + 40 * " --problem-set observed=opponent"
        metrics = rows(name, steps=2_000, seconds=650.0, first=0.9, floor=0.1)
        folders.append(write_run(tmp_path / name, configuration, metrics))
    write_report(folders, tmp_path / "report.html")
    seen = visit(visited(tmp_path / "report.html", LAPTOP), width=1200).seen
    assert seen["cut"] == []
    assert seen["lines"] > 3
    assert seen["brokenWords"] == []


@pytest.mark.parametrize(("scheme", "paper"), [(1, (255, 255, 255)), (0, (20, 24, 29))])
def test_follows_the_colour_scheme(page: Path, scheme: int, paper: tuple[int, ...]) -> None:
    picture = page.with_name(f"scheme-{scheme}.png")
    chromium(
        page,
        f"--blink-settings=preferredColorScheme={scheme}",
        "--window-size=1280,1000",
        f"--screenshot={picture}",
    )
    pixels = np.round(255 * matplotlib.image.imread(picture)[..., :3])
    assert tuple(pixels[-1, 0]) == paper
    assert len(np.unique(pixels @ (65_536, 256, 1))) > 50


@pytest.mark.skipif(shutil.which("pdftoppm") is None, reason="needs pdftoppm of poppler-utils")
def test_prints_white_from_a_dark_screen(page: Path) -> None:
    pdf = page.with_suffix(".pdf")
    dark = "--blink-settings=preferredColorScheme=0"
    chromium(page, dark, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    subprocess.run(["pdftoppm", "-r", "40", "-png", pdf, pdf.with_suffix("")], check=True)
    sheets = [matplotlib.image.imread(file) for file in sorted(page.parent.glob("report-*.png"))]
    assert 2 <= len(sheets) <= 6
    for sheet in sheets:
        assert sheet[0, 0, :3].min() == 1.0
        assert sheet[..., :3].mean() > 0.85
    # The first curve's blue is somewhere on paper.
    blue = np.array([0x00, 0x65, 0xB3]) / 255
    assert any((np.abs(sheet[..., :3] - blue).max(-1) < 0.08).any() for sheet in sheets)
