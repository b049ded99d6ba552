"""Tables and figures of README and docs, made from results."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pages
from benchmarks.catalogue import PARTS
from benchmarks.environment import describe
from benchmarks.parts import NOT_MEASURED, Section
from benchmarks.records import write
from krylov_descent.laboratory.exhibit_lines import MISSING
from krylov_descent.laboratory.reproduce import DEFAULTS, HF, exhibit
from tests.laboratory.example_runs import write_seeds

PAGE = "before\n\n<!-- generated:memory-x86_64 -->\nold\n<!-- end:memory-x86_64 -->\n\nafter\n"
FIGURE = "<!-- generated:growth-x86_64:figures -->\nold\n<!-- end:growth-x86_64:figures -->\n"


def memory() -> Section:
    return {
        "environment": describe(torch.device("cpu")),
        "curvature": "gauss-newton",
        "dimension": 10,
        "vectors": 12.345,
        "bound": 18,
        "parameters": 100,
        "width": 5,
        "depth": 4,
        "samples": 3,
    }


def growth() -> Section:
    base = {"n": 1, "N": 2, "K": 3, "B": 4, "C": 5}
    cost = {
        "seconds": {"median": 0.002, "low": 0.001, "high": 0.003},
        "evaluations": {"median": 20, "low": 19, "high": 21},
    }
    return {
        "environment": describe(torch.device("cpu")),
        "axis": "K",
        "base": base,
        "repeats": 3,
        "rows": [{**base, **cost, "K": k, "bytes": k << 20} for k in (3, 9)],
    }


def test_a_page_gets_its_table_between_the_marks(tmp_path: Path) -> None:
    write(tmp_path / "memory-x86_64" / "gauss-newton-10.json", memory())
    filled = pages.fill(PAGE, tmp_path)
    assert "| gauss-newton | 10 | 12.3 | 18 |" in filled
    assert filled.startswith("before\n\n<!-- generated:memory-x86_64 -->\n\n| curvature")
    assert pages.fill(filled, tmp_path) == filled


def test_without_results_a_table_says_so(tmp_path: Path) -> None:
    assert pages.fill(PAGE, tmp_path) == PAGE.replace("old\n", f"\n{NOT_MEASURED}\n\n")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("<!-- generated:memory-x86_64 -->\n", "without its"),
        ("<!-- generated:memory-x86_64:a -->\n<!-- end:memory-x86_64:b -->\n", "without its"),
        ("<!-- generated:other -->\n<!-- end:other -->\n", "'other'; there are product, memory"),
        (
            "<!-- generated:step-x86_64:x -->\n<!-- end:step-x86_64:x -->\n",
            "'x' of step-x86_64; there are phases",
        ),
    ],
)
def test_a_page_with_wrong_marks_is_named(page: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"README.md.*{problem}"):
        pages.fill(page, tmp_path, "README.md")


def test_outdated_pages_are_found_and_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(PAGE)
    (tmp_path / "README.md").write_text("no table here\n")
    write(tmp_path / "memory-x86_64" / "gauss-newton-10.json", memory())
    assert pages.update(tmp_path, tmp_path, check=True) == 1
    assert page.read_text() == PAGE
    assert "docs/page.md: out of date" in capsys.readouterr().out
    assert pages.update(tmp_path, tmp_path, check=False) == 0
    assert "gauss-newton" in page.read_text()
    assert pages.update(tmp_path, tmp_path, check=True) == 0


def test_figures_are_drawn_where_the_page_links_to_them_and_the_same_each_time(
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "benchmarks.md"
    page.write_text(FIGURE)
    write(tmp_path / "growth-x86_64" / "K.json", growth())
    pages.update(tmp_path, tmp_path, check=False)
    link = re.search(r"!\[.+\]\((.+)\)", page.read_text())
    assert link is not None
    figure = tmp_path / "docs" / link[1]
    first = figure.read_text()
    assert "seconds a step" in first
    pages.draw(figure.parent, tmp_path)
    assert figure.read_text() == first


def test_the_tables_of_readme_and_docs_are_up_to_date() -> None:
    assert list(pages.outdated()) == [], "run `python -m benchmarks tables`"


def test_every_part_can_be_measured_on_both_devices() -> None:
    for part in PARTS.values():
        for device in pages.PLACES.values():
            names = part.sections(device)
            assert len(set(names)) == len(names) > 0
            # They are names of files.
            assert all(re.fullmatch(r"[\w.-]+", name) for name in names)


def words(frame: float, tandem: float) -> dict[str, Any]:
    """What `ksd words` writes, for clean speech and for one noise level."""
    clean = {"snr": None, "frame": frame, "hybrid": 0.5, "tandem": tandem, "mfcc": 0.02}
    return {"optimizer": "x", "conditions": [clean, {**clean, "snr": 5.0, "frame": 2 * frame}]}


def test_the_tables_of_speech_have_a_column_for_each_network(tmp_path: Path) -> None:
    assert pages.frames_table(tmp_path) == pages.words_table(tmp_path) == NOT_MEASURED
    folder = tmp_path / "trials" / "words"
    folder.mkdir(parents=True)
    for name, found in {"ksd": words(0.1, 0.01), "hf": words(0.125, 0.03)}.items():
        (folder / f"{name}.json").write_text(json.dumps(found))
    assert pages.frames_table(tmp_path).splitlines() == [
        "| noise | KSD | HF |",
        "| --- | ---: | ---: |",
        "| clean | 10.00% | 12.50% |",
        "| 5 dB | 20.00% | 25.00% |",
    ]
    head, _, clean, _ = pages.words_table(tmp_path).splitlines()
    assert head == "| noise | Hybrid, KSD | Hybrid, HF | Tandem, KSD | Tandem, HF | MFCC alone |"
    assert clean == "| clean | 50.00% | 50.00% | 1.00% | 3.00% | 2.00% |"


def test_a_page_names_what_was_not_run_below_the_table(tmp_path: Path) -> None:
    write_seeds(tmp_path, HF, 1)
    page = pages.exhibit_table(exhibit("table2").only(["curves", "speech"]), tmp_path)
    assert MISSING not in page
    assert "| HF (1 of 3) |" in page
    assert "**speech**" not in page  # nothing would be below it
    last = page.splitlines()[-1]
    assert last.startswith(f"Not run: {DEFAULTS} on curves, speech; ")
    assert f"{HF} on speech" in last
