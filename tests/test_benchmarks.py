"""The harness at tiny sizes: what it measures, writes and puts into tables."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as harness
from benchmarks import environment, memory, product, tables, timing
from benchmarks.parts import PARTS, result_file

# Importing curvlinops compiles something with it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)
CPU = torch.device("cpu")
PAGE = "before\n\n<!-- generated:product -->\nold\n<!-- end:product -->\n\nafter\n"


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    pytest.importorskip("curvlinops")
    found = product.measure(CPU, 3, sizes=(20, 10, 4), samples=30, products=3)
    return {"part": "product", "environment": environment.describe(CPU), **found}


def test_the_environment_says_where_and_with_what() -> None:
    found = environment.describe(CPU)
    assert found["versions"]["torch"] == environment.version_of("torch")
    assert found["threads"] == torch.get_num_threads()
    assert found["device"] == found["cpu"] != ""
    assert found["commit"] is None or len(found["commit"].split("+")[0]) == 40
    json.dumps(found)


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert environment.version_of("no-such-package") is None


def test_a_spread_is_the_median_with_the_extremes() -> None:
    found = timing.spread([3.0, 1.0, 2.0, 10.0])
    assert found == {"median": 2.5, "low": 1.0, "high": 10.0}
    assert timing.show(found) == "2.50 (1.00 to 10.00)"


def test_every_curvature_is_timed_in_both_libraries(measured: dict[str, Any]) -> None:
    rows = {(row["library"], row["curvature"]) for row in measured["rows"]}
    kinds = {"gauss-newton", "hessian", "fisher"}
    assert rows == {(library, kind) for library in (product.OURS, product.PEER) for kind in kinds}
    assert measured["settings"]["parameters"] == 2 * (20 * 10 + 10 * 4) + 10 + 4 + 10 + 20
    for row in measured["rows"]:
        assert len(row["runs"]) == 3
        assert 0 < row["gradients"]["low"] <= row["gradients"]["median"] <= row["gradients"]["high"]


def test_libraries_that_disagree_are_not_compared() -> None:
    candidates = [
        product.Candidate(product.OURS, "hessian", lambda: lambda v: v),
        product.Candidate(product.PEER, "hessian", lambda: lambda v: v.flip(0)),
    ]
    with pytest.raises(RuntimeError, match="do not measure the same matrix"):
        product._check_agreement(candidates, torch.arange(3.0))


def test_a_missing_peer_is_skipped_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = product.measure(CPU, 1, sizes=(6, 4, 2), samples=5, products=2, peer="no-such-package")
    assert found["skipped"] == ["no-such-package"]
    assert {row["library"] for row in found["rows"]} == {product.OURS}
    assert "no-such-package skipped: it is not installed" in capsys.readouterr().out
    result = {"environment": environment.describe(CPU), **found}
    assert "curvlinops" not in product.table(result)


def test_memory_is_measured_and_within_its_bound() -> None:
    if not memory.STATUS.exists():
        pytest.skip("peak memory on the CPU is read from /proc")
    row = memory.measure_case(memory.Case(3, "gauss-newton", width=1000))
    assert row["parameters"] == 4 * (1000 * 1000 + 1000)
    # The basis alone is K + 1 vectors: a figure below it would mean that nothing was measured.
    assert 3 + 1 < row["vectors"] <= row["bound"] == 3 + 8


def test_a_case_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="dimension"):
        memory.measure_case(memory.Case(0, "gauss-newton", width=4))


class TinyPart:
    """The product at a size for tests."""

    def measure(self, device: torch.device, repeats: int) -> dict[str, Any]:
        return product.measure(device, repeats, sizes=(6, 4, 2), samples=5, products=2)

    def table(self, result: dict[str, Any]) -> str:
        return product.table(result)


class AbsentPart(TinyPart):
    def measure(self, device: torch.device, repeats: int) -> dict[str, Any]:
        raise environment.UnavailableError(f"no such thing on {device}")


def test_a_part_is_measured_written_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.run("product", TinyPart(), CPU, 2, tmp_path / "results")
    written = json.loads((tmp_path / "results" / "product.json").read_text())
    assert written["part"] == "product"
    assert written["settings"]["repeats"] == 2
    assert written["environment"]["threads"] == torch.get_num_threads()
    assert product.table(written) in capsys.readouterr().out


def test_a_part_that_cannot_be_measured_is_skipped_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harness.run("product", AbsentPart(), CPU, 2, tmp_path)
    assert capsys.readouterr().out == "product skipped: no such thing on cpu\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["nothing"], ["--repeats", "0"]])
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        harness.main(arguments)
    assert refusal.value.code == 2


def test_results_of_a_gpu_have_a_file_and_a_table_of_their_own() -> None:
    assert result_file("product", CPU) == "product.json"
    assert result_file("product", torch.device("cuda")) == "product-cuda.json"


def test_a_page_gets_its_table_between_the_marks(measured: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "product.json").write_text(json.dumps(measured))
    filled = tables.fill(PAGE, tmp_path)
    table = PARTS["product"].table(measured)
    assert filled == PAGE.replace("old", f"\n{table}\n")
    assert tables.fill(filled, tmp_path) == filled
    for row in measured["rows"]:
        assert timing.show(row["gradients"]) in filled


def test_without_results_a_table_is_empty(tmp_path: Path) -> None:
    assert tables.fill(PAGE, tmp_path) == PAGE.replace("old\n", "")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("<!-- generated:product -->\n", "without its"),
        ("<!-- generated:other -->\n<!-- end:other -->\n", "'other'; there are product, memory"),
    ],
)
def test_a_page_with_wrong_marks_is_named(page: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"README.md.*{problem}"):
        tables.fill(page, tmp_path, "README.md")


def test_outdated_pages_are_found_and_repaired(
    measured: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(PAGE)
    (tmp_path / "README.md").write_text("no table here\n")
    (tmp_path / "product.json").write_text(json.dumps(measured))
    assert tables.update(tmp_path, tmp_path, check=True) == 1
    assert page.read_text() == PAGE
    assert "docs/page.md: out of date" in capsys.readouterr().out
    assert tables.update(tmp_path, tmp_path, check=False) == 0
    assert "Gauss-Newton" in page.read_text()
    assert tables.update(tmp_path, tmp_path, check=True) == 0


def test_the_tables_of_readme_and_docs_are_up_to_date() -> None:
    assert list(tables.outdated()) == [], "run `python -m benchmarks tables`"
