"""The report in headless Chromium: what is drawn, what the controls do, phone, dark, print."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from krylov_descent.laboratory.report import Reconstructions, write_report
from tests.laboratory.example_runs import (
    CLASSIFIER,
    config,
    curve_images,
    rows,
    write_comparison,
    write_run,
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(
    FOUND is None, reason="needs Chromium: install it, or name it in the variable CHROMIUM"
)

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


@dataclass(frozen=True)
class Visit:
    """What was seen of a page."""

    dom: str
    console: list[str]
    requests: list[str]

    @property
    def seen(self) -> dict[str, Any]:
        """What the page's own script noted down."""
        noted = re.search(r'data-seen="([^"]*)"', self.dom)
        assert noted is not None, self.console
        answer: dict[str, Any] = json.loads(noted[1].replace("&quot;", '"'))
        return answer


def chromium(page: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert FOUND is not None
    fixed = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # the browser's own requests go nowhere
        "--enable-logging=stderr",
        "--virtual-time-budget=2000",
        "--disable-dev-shm-usage",  # which is small in containers
        f"--user-data-dir={mkdtemp(dir=page.parent)}",  # none that another may still be leaving
    )
    return subprocess.run(
        [FOUND, *fixed, *arguments, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def visit(page: Path, width: int = 1280) -> Visit:
    log = page.with_suffix(".net.json")
    done = chromium(page, f"--log-net-log={log}", "--dump-dom", f"--window-size={width},1000")
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # Requests of the browser itself have no origin; those of a page from a file have "null".
    asked = [str(e.get("url")) for e in events if e.get("initiator", "not an origin") == "null"]
    return Visit(done.stdout, console, [url for url in asked if url != page.as_uri()])


def visited(page: Path, script: str) -> Path:
    """A copy of the page with a visitor in it."""
    copy = page.with_name("visited.html")
    copy.write_text(page.read_text().replace("</body>", f"<script>{{{script}}}</script></body>"))
    return copy


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
    assert re.fullmatch(r"1\d(\.\d)? seconds", seen["tooltip"][0])
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
