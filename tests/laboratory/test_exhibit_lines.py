"""The lines of a table of the paper, with the runs that are there."""

from pathlib import Path

from benchmarks.pages import exhibit_table
from krylov_descent.laboratory.exhibit_lines import MISSING, lines
from krylov_descent.laboratory.reproduce import DEFAULTS, HF, Exhibit, by_line, exhibit
from tests.laboratory.example_runs import rows, write_run


def table() -> Exhibit:
    return exhibit("table2").only(["curves"])


def run_seeds(base: Path, column: str, count: int) -> list[float]:
    """So many runs of a line; their lowest test errors."""
    found = []
    for cell in by_line(table().cells)["curves", column][:count]:
        metrics = rows(steps=20, floor=0.1 + cell.settings.seed)
        folder = write_run(cell.folder(base).path, metrics=metrics, ending=None)
        folder.finish({"ending": "early_stop", "best": metrics[-1], "last": metrics[-1]})
        found.append(metrics[-1]["test"])
    return found


def test_several_seeds_are_a_mean_with_its_interval(tmp_path: Path) -> None:
    errors = run_seeds(tmp_path, DEFAULTS, 3)
    found = {name: columns for name, *columns in lines(table(), tmp_path)}
    assert found[DEFAULTS][1].startswith(f"{sum(errors) / 3:.3g} ± ")
    assert found[HF] == [MISSING]


def test_a_line_with_one_of_its_runs_says_so(tmp_path: Path) -> None:
    (error,) = run_seeds(tmp_path, HF, 1)
    found = {name: columns for name, *columns in lines(table(), tmp_path)}
    assert found[f"{HF} (1 of 3)"][1] == f"{error:.3g}"


def test_a_page_names_what_was_not_run_below_the_table(tmp_path: Path) -> None:
    run_seeds(tmp_path, HF, 1)
    page = exhibit_table(table(), tmp_path)
    assert f"| {MISSING}" not in page
    assert "| HF (1 of 3) |" in page
    assert page.splitlines()[-1].startswith(f"Not run: {DEFAULTS} on curves; ")
