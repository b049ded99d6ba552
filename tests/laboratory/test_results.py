import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from krylov_descent.laboratory.problems import starcraft
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.reproduce import DEFAULTS, HF, PAPER, Cell, by_line, exhibit
from krylov_descent.laboratory.results import (
    CURVE_POINTS,
    ratio_of,
    ratio_of_line,
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


def test_times_of_two_machines_are_not_compared(tmp_path: Path) -> None:
    folders = [ended(tmp_path / name, KSD_POINTS) for name in ("ksd", "hf", "other")]
    for folder, gpu in zip(folders, ("a GPU", "a GPU", "another"), strict=True):
        config_of = folder.config() | {"environment": {"gpu": gpu, "commit": folder.path.name}}
        (folder.path / "config.json").write_text(json.dumps(config_of))
    ksd, hf, other = folders
    assert time_ratio(ksd, hf) is not None
    assert time_ratio(ksd, other) is None


def cell_folder(base: Path, row: str, column: str) -> RunFolder:
    cells = exhibit("table2").of_rows([row])
    return next(cell for cell in cells if cell.column == column).folder(base)


def summary(base: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads(summarize(exhibit("table2"), base).read_text())
    assert found["title"] == "Table 2 of the paper"
    first = [cell for cell in found["cells"] if "seed" not in cell]
    return {(cell["row"], cell["column"]): cell for cell in first}


def test_the_summary_of_nothing_has_every_cell_as_missing(tmp_path: Path) -> None:
    found = summary(tmp_path / "results")
    assert found.keys() == by_line(exhibit("table2").cells).keys()
    assert all(cell["outcome"] is None for cell in found.values())


def test_the_summary_has_what_each_cell_found(tmp_path: Path) -> None:
    ended(cell_folder(tmp_path, "curves", HF).path, HF_POINTS)
    ended(cell_folder(tmp_path, "curves", PAPER).path, KSD_POINTS)
    ended(cell_folder(tmp_path, "curves", DEFAULTS).path, KSD_POINTS, None)
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
    assert found["curves", DEFAULTS]["outcome"] is None  # unfinished
    assert found["mnist-autoencoder", PAPER]["outcome"] is None  # interrupted
    assert sum(cell["outcome"] is not None for cell in found.values()) == 2


SPLIT_POINTS: list[Points] = [
    [(0.0, 0.9), (2.0, 0.1)],
    [(0.0, 0.9), (4.0, 0.3)],
    [(0.0, 0.9), (9.0, 0.2)],
]


def split_cells(column: str) -> list[Cell]:
    return by_line(exhibit("table2").cells)[starcraft.NAME, column]


def test_splits_share_a_line_with_mean_interval_and_median_ratio(tmp_path: Path) -> None:
    hf = [(0.0, 0.9), (10.0, 0.3)]
    for cell, other, points in zip(split_cells(PAPER), split_cells(HF), SPLIT_POINTS, strict=False):
        ended(cell.folder(tmp_path).path, points)
        ended(other.folder(tmp_path).path, hf)
    found = json.loads(summarize(exhibit("table2"), tmp_path).read_text())
    means = {mean["column"]: mean for mean in found["means"]}
    assert list(means) == [HF, PAPER]
    assert means[PAPER]["row"] == starcraft.NAME
    assert means[PAPER]["test"]["mean"] == pytest.approx(0.2)
    assert means[PAPER]["test"]["runs"] == 3
    # 0.1 / √3 times Student's t of 2 degrees of freedom, 4.3027.
    assert means[PAPER]["test"]["half_width"] == pytest.approx(0.24841, rel=1e-4)
    assert means[HF]["train"]["half_width"] == 0.0
    there = [cell for cell in found["cells"] if cell["outcome"] and cell["column"] == PAPER]
    assert [cell["split"] for cell in there] == [0, 1, 2]
    assert not any("curve" in cell for cell in there)
    assert [cell["time_ratio"]["total"] for cell in there] == [0.2, 0.4, 0.9]
    ratio = ratio_of_line(split_cells(PAPER), tmp_path)
    assert ratio is not None
    assert (ratio.total, ratio.bound, ratio.to_worse) == (0.4, "", 0.4)


def test_splits_cut_short_in_different_ways_have_no_ratio(tmp_path: Path) -> None:
    for cell, other, points, ending in zip(
        split_cells(PAPER),
        split_cells(HF),
        SPLIT_POINTS,
        ("early_stop", "seconds", "early_stop"),
        strict=False,
    ):
        ended(cell.folder(tmp_path).path, points, ending)
        ended(other.folder(tmp_path).path, [(0.0, 0.9), (10.0, 0.3)])
    ratio = ratio_of_line(split_cells(PAPER), tmp_path)
    assert ratio is not None
    assert ratio.total is None
    assert ratio_of_line(split_cells(DEFAULTS), tmp_path) is None
    assert ratio_of_line(split_cells(HF), tmp_path) is None


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
    ended(cell_folder(tmp_path, "curves", DEFAULTS).path, KSD_POINTS)
    cells = exhibit("table2").of_rows(["curves"])
    assert [cell.column for cell in cells if ratio_of(cell, tmp_path) is not None] == [DEFAULTS]


def test_runs_that_a_limit_ended_have_no_part_in_a_ratio_that_looks_exact(tmp_path: Path) -> None:
    """Both of the first split's ended at a limit, and none of the second's."""
    for cell, other, ending in zip(
        split_cells(PAPER), split_cells(HF), ("seconds", "early_stop"), strict=False
    ):
        ended(cell.folder(tmp_path).path, [(0.0, 0.9), (4.0, 0.1)], ending)
        ended(other.folder(tmp_path).path, [(0.0, 0.9), (10.0, 0.3)], ending)
    ratio = ratio_of_line(split_cells(PAPER), tmp_path)
    assert ratio is not None
    assert (ratio.total, ratio.bound) == (None, "")
    assert ratio.to_worse == 0.4


def test_a_line_has_a_ratio_when_hf_has_all_of_its_runs(tmp_path: Path) -> None:
    for cell in split_cells(PAPER)[:2]:
        ended(cell.folder(tmp_path).path, [(0.0, 0.9), (4.0, 0.1)])
    others = split_cells(HF)
    ended(others[0].folder(tmp_path).path, [(0.0, 0.9), (10.0, 0.3)])
    assert ratio_of_line(split_cells(PAPER), tmp_path) is None
    ended(others[1].folder(tmp_path).path, [(0.0, 0.9), (5.0, 0.3)])
    ratio = ratio_of_line(split_cells(PAPER), tmp_path)
    assert ratio is not None
    assert ratio.total == pytest.approx(0.6)


def test_seeds_share_a_line_and_the_first_has_the_curve(tmp_path: Path) -> None:
    cells = by_line(exhibit("table2").cells)["curves", DEFAULTS]
    for cell, test in zip(cells, (1.0, 2.0, 6.0), strict=True):
        ended(cell.folder(tmp_path).path, [(0.0, 9.0), (2.0, test)])
    found = json.loads(summarize(exhibit("table2"), tmp_path).read_text())
    (mean,) = found["means"]
    assert (mean["row"], mean["column"]) == ("curves", DEFAULTS)
    assert (mean["test"]["mean"], mean["test"]["runs"]) == (3.0, 3)
    there = [cell for cell in found["cells"] if cell["outcome"]]
    assert [cell.get("seed", 0) for cell in there] == [0, 1, 2]
    assert ["curve" in cell for cell in there] == [True, False, False]


def test_records_of_the_repository_name_no_folder_of_a_machine() -> None:
    """Their commands can be repeated where they lie."""
    folder = Path(__file__).parents[2] / "results"
    records = list(folder.rglob("config.json"))
    assert records
    for record in records:
        words = shlex.split(json.loads(record.read_text())["command"])
        if "--folder" in words:
            assert not Path(words[words.index("--folder") + 1]).is_absolute(), record
