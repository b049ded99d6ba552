from dataclasses import replace
from pathlib import Path

import pytest

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.contenders import PAPER_METHOD
from krylov_descent.laboratory.problems import PROBLEMS, starcraft
from krylov_descent.laboratory.problems.mnist import PUBLISHED as MNIST_PUBLISHED
from krylov_descent.laboratory.reproduce import (
    DEFAULTS,
    EXHIBITS,
    FORMS,
    HF,
    PAPER,
    STARCRAFT_OPPONENT,
    by_line,
    exhibit,
)


def test_table2_has_all_problems_with_hf_and_forms_of_ksd_three_times() -> None:
    table = exhibit("table2")
    rows = [row for row in table.rows if row not in FORMS]
    assert rows == [name for name in PROBLEMS if name in rows]
    assert {"curves", *MNIST_PUBLISHED, "speech", starcraft.NAME} == set(rows)
    for row in table.rows:
        if row.startswith(starcraft.NAME):
            continue
        lines = by_line(table.of_rows([row]))
        assert [column for _, column in lines] == [HF, DEFAULTS, PAPER]
        first = [cells[0].settings for cells in lines.values()]
        assert [settings.optimizer for settings in first] == ["hf", "ksd", "ksd-paper"]
        assert first[1].optimizer_options == {}
        problem, options = FORMS.get(row, (row, {}))
        for settings in first:
            assert (settings.problem, settings.problem_options) == (problem, options)
        assert all(settings.limits.early_stop for settings in first)
        for cells in lines.values():
            assert [cell.settings.seed for cell in cells] == [0, 1, 2]
            assert len({repr(replace(cell.settings, seed=0)) for cell in cells}) == 1


def test_products_of_hf_and_ksd_are_in_one_precision() -> None:
    """KSD chooses tf32 by itself, so it is not given to any of its forms."""
    for name in ("table2", "figure1", "figure2"):
        for cell in exhibit(name).cells:
            options = cell.settings.optimizer_options
            assert options.get("tf32") == (True if cell.settings.optimizer == "hf" else None)
    assert "tf32" not in PAPER_METHOD


@pytest.mark.parametrize(
    ("row", "options"), [(starcraft.NAME, {}), (STARCRAFT_OPPONENT, {"observed": "opponent"})]
)
def test_starcraft_has_its_methods_on_ten_splits(row: str, options: dict[str, str]) -> None:
    lines = by_line(exhibit("table2").of_rows([row]))
    methods = [column for _, column in lines]
    assert methods == [HF, DEFAULTS, PAPER, "L-BFGS", "Logistic regression", "Gradient boosting"]
    for cells in lines.values():
        assert [cell.split for cell in cells] == list(range(10))
        assert [cell.settings.problem_options for cell in cells] == [
            {**options, "split": split} for split in range(10)
        ]
        assert len({(cell.settings.optimizer, cell.settings.seed) for cell in cells}) == 1
        assert {cell.settings.problem for cell in cells} == {starcraft.NAME}
    assert lines[row, HF][3].title == f"{row}, HF, split 3"


@pytest.mark.parametrize(("name", "row"), [("figure1", "speech"), ("figure2", "curves")])
def test_the_figures_have_both_methods_with_both_curvatures_and_lbfgs(name: str, row: str) -> None:
    cells = exhibit(name).cells
    assert {cell.row for cell in cells} == {cell.settings.problem for cell in cells} == {row}
    runs = [
        (cell.settings.optimizer, cell.settings.optimizer_options.get("curvature"))
        for cell in cells
    ]
    assert runs == [
        ("ksd", None),
        ("ksd-paper", None),
        ("ksd-paper", "hessian"),
        ("hf", None),
        ("hf", "hessian"),
        ("lbfgs", None),
        # It takes part on speech in the frame errors by noise level, too.
        *([("sgd", None)] if row == "speech" else []),
    ]


def test_a_figure_shares_the_runs_of_the_table(tmp_path: Path) -> None:
    table = {cell.folder(tmp_path).path: cell.settings for cell in exhibit("table2").cells}
    columns = (DEFAULTS, PAPER, HF)
    shared = [cell for cell in exhibit("figure2").cells if cell.column in columns]
    assert len(shared) == 3
    for cell in shared:
        assert table[cell.folder(tmp_path).path] == cell.settings


def test_rows_may_have_limits_of_their_own() -> None:
    table = exhibit("table2")
    limits = {cell.row: cell.settings.limits for cell in table.cells}
    assert (limits["speech"].seconds, limits["speech"].fewest_passes) == (300.0, 100.0)
    assert (limits["curves"].seconds, limits["curves"].fewest_passes) == (600.0, 500.0)
    assert limits["mnist-autoencoder"].fewest_passes == 250.0
    figure = exhibit("figure1").cells
    assert all(cell.settings.limits == limits["speech"] for cell in figure)


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_cell_has_a_folder_of_its_own(name: str, tmp_path: Path) -> None:
    paths = [cell.folder(tmp_path).path for cell in exhibit(name).cells]
    assert len(set(paths)) == len(paths)
    assert all(set(path.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for path in paths)


def test_the_quick_form_is_small_and_short_and_has_no_settings_of_the_paper() -> None:
    quick = exhibit("figure2").adapted("cuda", quick=True)
    assert quick.title == "Figure 2 of the paper: CURVES, small forms with 20 s a run"
    for cell in quick.cells:
        assert cell.settings.device == "cuda"
        assert cell.settings.problem_options == {"size": "small"}
        assert cell.settings.limits.seconds == 20.0
    settings = {cell.column: cell.settings for cell in quick.cells}
    assert {name: (s.optimizer, s.optimizer_options) for name, s in settings.items()} == {
        DEFAULTS: ("ksd", {}),
        "KSD, Hessian": ("ksd", {"curvature": "hessian"}),
        HF: ("hf", {"tf32": True}),
        "HF, Hessian": ("hf", {"curvature": "hessian", "tf32": True}),
        "L-BFGS": ("lbfgs", {}),
    }
    full = exhibit("figure2").adapted("cuda", quick=False)
    assert all(cell.settings.problem_options == {} for cell in full.cells)
    assert PAPER in [cell.column for cell in full.cells]


def test_no_two_columns_of_a_quick_table_are_the_same_run() -> None:
    table = exhibit("table2").adapted("cpu", quick=True)
    runs = [(cell.row, repr(cell.settings)) for cell in table.cells]
    assert {cell.settings.seed for cell in table.cells} == {0}
    assert len(set(runs)) == len(runs)
    assert "ksd-paper" not in [cell.settings.optimizer for cell in table.cells]


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="Unknown exhibit 'tabel2': did you mean 'table2'"):
        exhibit("tabel2")
    with pytest.raises(UnknownNameError, match="Unknown row of table2 'curve': did you mean 'cur"):
        exhibit("table2").of_rows(["curve"])


def test_the_quick_form_has_two_splits() -> None:
    quick = exhibit("table2").adapted("cpu", quick=True).of_rows([starcraft.NAME])
    assert {cell.split for cell in quick} == {0, 1}
    assert all(
        cell.settings.problem_options == {"split": cell.split, "size": "small"} for cell in quick
    )
