import json
from pathlib import Path
from typing import Any

import pytest

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.problems import PROBLEMS
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.reproduce import (
    BEST,
    CURVE_POINTS,
    CURVES_CODE_6,
    EXHIBITS,
    HF,
    PAPER,
    exhibit,
    ratio_of,
    summarize,
    time_ratio,
)
from tests.laboratory.example_runs import config, rows, write_run

Points = list[tuple[float, float]]


def ended(path: Path, points: Points, ending: str | None = "early_stop") -> RunFolder:
    """A run with these (seconds, training error)."""
    folder = RunFolder(path)
    folder.begin(config())
    metrics = [
        {"iteration": i, "seconds": s, "passes": i, "train": e, "validation": e, "test": e}
        for i, (s, e) in enumerate(points)
    ]
    for row in metrics:
        folder.append(row)
    if ending is not None:
        folder.finish({"ending": ending, "sentence": "", "best": metrics[-1], "last": metrics[-1]})
    return folder


# HF ends at 4.0 after 40 s; KSD passes 4.0 at 6 s and ends at 1.0 after 10 s.
KSD_POINTS = [(0.0, 9.0), (3.0, 5.0), (6.0, 3.5), (10.0, 1.0)]
HF_POINTS = [(0.0, 9.0), (12.0, 6.0), (24.0, 4.0), (40.0, 4.0)]


@pytest.mark.parametrize(
    ("ksd", "hf", "total", "bound"),
    [
        ("early_stop", "early_stop", 0.25, ""),
        ("early_stop", "stuck", 0.25, ""),
        ("early_stop", "seconds", 0.25, "at most"),
        ("iterations", "early_stop", 0.25, "at least"),
        ("seconds", "passes", None, ""),
    ],
)
def test_the_time_ratios_by_hand(
    tmp_path: Path, ksd: str, hf: str, total: float | None, bound: str
) -> None:
    ratio = time_ratio(
        ended(tmp_path / "ksd", KSD_POINTS, ksd), ended(tmp_path / "hf", HF_POINTS, hf)
    )
    assert ratio is not None
    assert (ratio.total, ratio.bound) == (total, bound)
    assert ratio.to_worse == 6.0 / 24.0


def test_the_time_to_equal_error_where_ksd_is_the_worse(tmp_path: Path) -> None:
    ours = [(0.0, 9.0), (2.0, 5.0)]
    ratio = time_ratio(ended(tmp_path / "ksd", ours), ended(tmp_path / "hf", HF_POINTS))
    assert ratio is not None
    assert ratio.to_worse == 2.0 / 24.0


def test_an_error_that_hf_begins_with_takes_no_time(tmp_path: Path) -> None:
    ratio = time_ratio(
        ended(tmp_path / "ksd", [(0.0, 9.0), (2.0, 9.5)]), ended(tmp_path / "hf", HF_POINTS)
    )
    assert ratio is not None
    assert ratio.to_worse is None


@pytest.mark.parametrize("ending", [None, "interrupted"])
def test_an_unfinished_run_has_no_ratio(tmp_path: Path, ending: str | None) -> None:
    ksd = ended(tmp_path / "ksd", KSD_POINTS, ending)
    hf = ended(tmp_path / "hf", HF_POINTS)
    assert time_ratio(ksd, hf) is None
    assert time_ratio(hf, ksd) is None
    assert time_ratio(hf, RunFolder(tmp_path / "nothing")) is None


def test_table2_has_all_problems_with_three_runs_each() -> None:
    table = exhibit("table2")
    assert [row for row in table.rows if row != CURVES_CODE_6] == list(PROBLEMS)
    for row in table.rows:
        cells = {cell.column: cell.settings for cell in table.of_rows([row])}
        assert list(cells) == [HF, PAPER, BEST]
        assert [cells[c].optimizer for c in (HF, PAPER, BEST)] == ["hf", "ksd-paper", "ksd"]
        problem, options = ("curves", {"code_size": 6}) if row == CURVES_CODE_6 else (row, {})
        for settings in cells.values():
            assert (settings.problem, settings.problem_options) == (problem, options)
        assert all(settings.limits.early_stop for settings in cells.values())


def test_figure2_has_both_methods_with_both_curvatures_and_lbfgs() -> None:
    runs = [
        (cell.settings.optimizer, cell.settings.optimizer_options.get("curvature"))
        for cell in exhibit("figure2").cells
    ]
    assert runs == [
        ("ksd-paper", "gauss-newton"),
        ("ksd-paper", "hessian"),
        ("hf", "gauss-newton"),
        ("hf", "hessian"),
        ("lbfgs", None),
    ]


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_cell_has_a_folder_of_its_own(name: str, tmp_path: Path) -> None:
    paths = [cell.folder(tmp_path).path for cell in exhibit(name).cells]
    assert len(set(paths)) == len(paths)
    assert all(set(path.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for path in paths)


def test_the_quick_form_is_small_short_and_keeps_the_curvature() -> None:
    quick = exhibit("figure2").adapted("cuda", quick=True)
    full = exhibit("figure2").adapted("cuda", quick=False)
    for cell, original in zip(quick.cells, full.cells, strict=True):
        assert cell.settings.device == original.settings.device == "cuda"
        assert cell.settings.problem_options["size"] == "small"
        assert original.settings.problem_options == {}
        assert cell.settings.limits.seconds == 20.0
        assert cell.settings.optimizer_options == original.settings.optimizer_options
    table = exhibit("table2").adapted("cpu", quick=True)
    assert all(cell.settings.optimizer_options == {} for cell in table.cells)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Unknown exhibit 'tabel2': did you mean 'table2'"):
        exhibit("tabel2")
    with pytest.raises(UnknownNameError, match="Unknown row of table2 'curve': did you mean 'cur"):
        exhibit("table2").of_rows(["curve"])


def cell_folder(base: Path, row: str, column: str) -> RunFolder:
    cells = exhibit("table2").of_rows([row])
    return next(cell for cell in cells if cell.column == column).folder(base)


def summary(base: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads(summarize(exhibit("table2"), base).read_text())
    assert found["title"] == "Table 2 of the paper"
    return {(cell["row"], cell["column"]): cell for cell in found["cells"]}


def test_the_summary_of_nothing_has_every_cell_as_missing(tmp_path: Path) -> None:
    found = summary(tmp_path / "results")
    assert len(found) == len(exhibit("table2").cells)
    assert all(cell["outcome"] is None for cell in found.values())


def test_the_summary_has_what_each_cell_found(tmp_path: Path) -> None:
    ended(cell_folder(tmp_path, "curves", HF).path, HF_POINTS)
    ended(cell_folder(tmp_path, "curves", PAPER).path, KSD_POINTS)
    ended(cell_folder(tmp_path, "curves", BEST).path, KSD_POINTS, None)
    ended(cell_folder(tmp_path, "mnist-autoencoder", PAPER).path, KSD_POINTS, "interrupted")
    found = summary(tmp_path)
    cell = found["curves", PAPER]
    assert cell["outcome"]["ending"] == "early_stop"
    assert cell["outcome"]["best"]["train"] == 1.0
    assert cell["time_ratio"] == {"total": 0.25, "bound": "", "to_worse": 0.25}
    assert cell["command"] == config()["command"]
    assert cell["versions"] == config()["versions"]
    assert [(row["seconds"], row["train"]) for row in cell["curve"]] == KSD_POINTS
    assert "time_ratio" not in found["curves", HF]
    assert found["curves", BEST]["outcome"] is None  # unfinished
    assert found["mnist-autoencoder", PAPER]["outcome"] is None  # interrupted
    assert sum(cell["outcome"] is not None for cell in found.values()) == 2


def test_long_runs_are_thinned_and_keep_their_end(tmp_path: Path) -> None:
    folder = cell_folder(tmp_path, "curves", HF)
    write_run(folder.path, metrics=rows(steps=777), ending=None)
    last = folder.rows()[-1]
    folder.finish({"ending": "early_stop", "best": last, "last": last})
    cell = summary(tmp_path)["curves", HF]
    assert CURVE_POINTS / 2 < len(cell["curve"]) <= CURVE_POINTS + 1
    assert cell["curve"][0]["iteration"] == 0
    assert cell["curve"][-1]["iteration"] == 777
    assert "ritz_values" not in cell["outcome"]["last"]
    assert cell["outcome"]["last"]["loss"] == last["loss"]


def test_only_ksd_is_measured_against_hf(tmp_path: Path) -> None:
    ended(cell_folder(tmp_path, "curves", HF).path, HF_POINTS)
    ended(cell_folder(tmp_path, "curves", BEST).path, KSD_POINTS)
    ratios = [ratio_of(cell, tmp_path) for cell in exhibit("table2").of_rows(["curves"])]
    assert [ratio is not None for ratio in ratios] == [False, False, True]
