import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from krylov_descent.laboratory.limits import Limits
from krylov_descent.laboratory.replays import file_name
from krylov_descent.laboratory.reproduce import DEFAULTS, EXHIBITS, HF, PAPER, Cell, Exhibit
from krylov_descent.laboratory.settings import RunSettings
from krylov_descent.laboratory.sources import SOURCES, Source
from tests.cli.asking import OPTIONS, TINY, Ksd, fits
from tests.laboratory.replay_files import write_matchup


@pytest.fixture
def small_exhibits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table and a figure of two quick runs each."""
    settings = RunSettings(
        problem="curves",
        problem_options={"size": "small", **OPTIONS},
        limits=Limits(iterations=2),
    )
    cells = tuple(
        Cell(row="curves", column=column, settings=replace(settings, optimizer=optimizer))
        for column, optimizer in ((HF, "adam"), (DEFAULTS, "sgd"))
    )
    mnist = RunSettings(problem="mnist-autoencoder", optimizer="adam")
    missing = Cell(row="mnist-autoencoder", column=HF, settings=mnist)
    table = Exhibit(name="table0", title="A table", cells=(*cells, missing))
    figure = Exhibit(name="figure0", title="A figure", cells=cells)
    monkeypatch.setitem(EXHIBITS, "table0", table)
    monkeypatch.setitem(EXHIBITS, "figure0", figure)


@pytest.mark.usefixtures("small_exhibits")
def test_a_table_is_made_once_and_shows_the_rows_asked_for(ksd: Ksd) -> None:
    first = ksd("reproduce", "table0", "--rows", "curves", "--quick")
    assert first.code == 0
    base = Path("runs/reproduce-quick")
    table = first.out[first.out.index("A table") :]
    assert fits(table)
    assert re.search(r"\n  curves +\n", table)
    assert re.search(r"\n    HF +[\d.]+ +[\d.]+ *\n", table)
    assert re.search(r"\n    KSD, defaults +[\d.]+ +[\d.]+ +- +", table)
    assert "A table, small forms with 20 s a run" in " ".join(table.split())
    assert "mnist-autoencoder" not in table
    assert table.endswith(
        "≥/≤: a time limit ended one of the runs; -: both, or different ones\n"
        f"Results: {base}/table0.json\n"
    )
    summary = json.loads((base / "table0.json").read_text())
    assert [cell["outcome"] and cell["outcome"]["ending"] for cell in summary["cells"]] == [
        "iterations",
        "iterations",
        None,
    ]
    kept = (base / "curves" / "hf" / "metrics.jsonl").read_text()
    second = ksd("reproduce", "table0", "--rows", "curves", "--quick")
    assert second.code == 0
    assert "curves, HF: there already" in second.out
    assert "curves, KSD, defaults: there already" in second.out
    assert (base / "curves" / "hf" / "metrics.jsonl").read_text() == kept
    assert table == second.out[second.out.index("A table") :]
    show = ["reproduce", "table0", "--quick", "--show"]
    shown = ksd(*show, "--rows", "curves")
    assert shown.code == 0
    assert table == shown.out[shown.out.index("A table") :]
    whole = ksd(*show)  # MNIST is not fetched
    assert re.search(r"\n  mnist-autoencoder +\n +HF +missing *\n", whole.out)
    refused = ksd(*show, "--rows", "mnist-autoencoder").sentence
    assert "holds no run of table0 --rows mnist-autoencoder yet" in refused


@pytest.mark.usefixtures("small_exhibits")
def test_what_is_shown_is_also_collected_where_that_can_be_written(ksd: Ksd) -> None:
    base = Path("here")
    show = ["--quick", "--folder", "here", "--show"]
    assert ksd("reproduce", "figure0", "--quick", "--folder", "here").code == 0
    json_file, picture = base / "figure0.json", base / "figure0.png"
    for path in (json_file, picture):
        path.unlink()
    assert ksd("reproduce", "figure0", *show).code == 0
    assert json_file.exists()
    assert picture.exists()
    for path in (json_file, picture):  # in whose place nobody can write, not even root
        path.unlink()
        path.mkdir()
    answer = ksd("reproduce", "figure0", *show)
    reasons = [f"{path} cannot be written: Is a directory" for path in (json_file, picture)]
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == f"Not brought up to date: {'; '.join(reasons)}\n"
    (base / "table0.json").mkdir()
    answer = ksd("reproduce", "table0", *show)
    assert answer.code == 0
    assert re.search(r"\n    HF +[\d.]+ +[\d.]+ *\n", answer.out)
    assert answer.err == (
        f"Not brought up to date: {base}/table0.json cannot be written: Is a directory\n"
    )


@pytest.mark.usefixtures("small_exhibits")
def test_a_row_whose_data_are_not_there_does_not_hide_the_others(ksd: Ksd) -> None:
    Path("data/mnist").mkdir(parents=True)
    Path("data/mnist/train-images-idx3-ubyte.gz").write_bytes(b"damaged")
    answer = ksd("reproduce", "table0", "--quick", "--data", "data")
    assert "train-images-idx3-ubyte.gz is damaged" in answer.sentence
    assert re.search(r"\n    KSD, defaults +[\d.]+", answer.out)
    assert re.search(r"\n +HF +missing", answer.out)


def test_the_splits_of_a_row_share_a_line_and_yardsticks_stand_beside(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_matchup(monkeypatch, Path("data"), games=60)
    cells = tuple(
        Cell(
            row="starcraft",
            column=column,
            settings=RunSettings(
                problem="starcraft",
                problem_options={"split": split},
                optimizer=optimizer,
                limits=Limits(iterations=1),
            ),
            split=split,
        )
        for split in range(3)
        for column, optimizer in (
            (HF, "sgd"),
            (PAPER, "adam"),
            ("Regression", "logistic-regression"),
        )
    )
    unfinished = replace(cells[0], column="Later", split=7)
    table = Exhibit(name="table0", title="A table", cells=(*cells, unfinished))
    monkeypatch.setitem(EXHIBITS, "table0", replace(table, cells=cells))
    assert ksd("reproduce", "table0", "--data", "data").code == 0
    monkeypatch.setitem(EXHIBITS, "table0", table)
    monkeypatch.setitem(SOURCES, file_name("TvZ", "Zerg"), Source("starcraft/x", None, None))
    answer = ksd("reproduce", "table0", "--data", "data")
    assert "starcraft, Regression, split 2: there already" in answer.out
    shown = answer.out[answer.out.index("A table") :]
    assert fits(shown)
    number = r"[\d.]+ ± [\d.]+%"
    assert re.search(rf"\n    HF +{number} +{number} *\n", shown)
    assert re.search(rf"\n    KSD, paper's settings +{number} +{number} +", shown)
    assert re.search(rf"\n    Regression +{number} +{number} *\n", shown)
    assert re.search(r"\n    Later +missing", shown)
    means = json.loads(Path("runs/reproduce/table0.json").read_text())["means"]
    assert [(mean["column"], mean["test"]["runs"]) for mean in means] == [
        (HF, 3),
        (PAPER, 3),
        ("Regression", 3),
    ]


def test_yardsticks_are_trained_and_compared_by_name(
    ksd: Ksd, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_matchup(monkeypatch, Path("data"), games=60)
    words = ["--data", "data", "--seconds", "0.1", "--optimizers", "adam,logistic-regression"]
    answer = ksd("compare", "starcraft", *words)
    assert answer.code == 0
    assert re.search(r"\n *Logistic +[\d.]+% +[\d.]+% +[\d.]+% .* fitted", answer.out)
    assert "Logistic regression" in Path("runs/compare-starcraft-0/report.html").read_text()
    answer = ksd("train", "starcraft", "--optimizer", "gradient-boosting", "--data", "data")
    assert answer.code == 0
    assert "It ended because the method has no iterations" in answer.out
    answer = ksd("train", "curves", *TINY, "--optimizer", "gradient-boosting")
    assert "'gradient-boosting' is for classification with one class per" in answer.sentence
    assert "logistic-regression, gradient-boosting" in ksd("optimizers").out
    assert "Scikit-learn's" in ksd("optimizers", "gradient-boosting").out


@pytest.mark.usefixtures("small_exhibits")
def test_a_figure_is_drawn(ksd: Ksd) -> None:
    answer = ksd("reproduce", "figure0", "--quick", "--folder", "here")
    assert answer.code == 0
    assert answer.out.endswith("Figure: here/figure0.png\n")
    assert Path("here/figure0.png").stat().st_size > 10_000


@pytest.mark.usefixtures("small_exhibits")
def test_the_cells_of_another_form_are_not_taken_for_these(ksd: Ksd) -> None:
    assert ksd("reproduce", "figure0", "--quick", "--folder", "here").code == 0
    config = json.loads(Path("here/curves/hf/config.json").read_text())
    config["problem"]["options"]["train"] = 31
    Path("here/curves/hf/config.json").write_text(json.dumps(config))
    answer = ksd("reproduce", "figure0", "--quick", "--folder", "here")
    assert answer.code == 1
    assert "here/curves/hf was started with problem_options" in answer.err


@pytest.mark.usefixtures("small_exhibits")
def test_a_run_of_other_settings_does_not_keep_the_others_from_being_made(ksd: Ksd) -> None:
    assert ksd("reproduce", "figure0", "--quick", "--folder", "here").code == 0
    path = Path("here/curves/hf/config.json")
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    other = Path("here/curves/ksd-defaults")
    shutil.rmtree(other)
    answer = ksd("reproduce", "figure0", "--quick", "--folder", "here")
    assert answer.code == 1
    assert "here/curves/hf was started with seed = 7" in answer.err
    assert (other / "outcome.json").exists()
