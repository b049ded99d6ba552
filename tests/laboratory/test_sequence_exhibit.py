"""Who solves what: the cells of `ksd reproduce sequences` and the table of their verdicts."""

from pathlib import Path

from krylov_descent.laboratory.contenders import contender
from krylov_descent.laboratory.exhibit_lines import headings, legend, lines
from krylov_descent.laboratory.problems.sequences import TASKS
from krylov_descent.laboratory.record import RunFolder
from krylov_descent.laboratory.reproduce import exhibit
from krylov_descent.laboratory.sequence_exhibit import Verdict, verdict
from tests.laboratory.example_runs import config


def ended(folder: RunFolder, errors: list[tuple[float, float]], ending: str) -> None:
    """A run with these validation and test errors, two seconds apart."""
    folder.begin(config())
    rows = [
        {"iteration": i, "seconds": 2.0 * i, "passes": i, "train": v, "validation": v, "test": t}
        for i, (v, t) in enumerate(errors)
    ]
    for row in rows:
        folder.append(row)
    best = min(rows, key=lambda row: row["validation"])
    folder.finish({"ending": ending, "sentence": "", "best": best, "last": rows[-1]})


def test_every_task_is_tried_by_four_optimisers_with_both_cells() -> None:
    shown = exhibit("sequences")
    assert shown.rows == [*TASKS, *(f"{task}-lstm" for task in TASKS)]
    for row in shown.rows:
        cells = {cell.column: cell.settings for cell in shown.of_rows([row])}
        assert list(cells) == ["KSD", "HF", "Adam", "SGD, clipped"]
        for settings in cells.values():
            contender(settings.optimizer)
            assert settings.problem == row.removesuffix("-lstm")
            assert settings.problem_options.get("cell") == ("lstm" if "lstm" in row else None)
            assert settings.dtype == "float64"
            assert settings.limits.early_stop is None
            assert settings.limits.target == 0.0005


def test_the_verdict_is_on_test_errors(tmp_path: Path) -> None:
    solved, lucky, not_yet = (RunFolder(tmp_path / name) for name in ("a", "b", "c"))
    ended(solved, [(1.0, 1.0), (0.0003, 0.0009)], "solved")
    ended(lucky, [(1.0, 1.0), (0.0003, 0.001)], "solved")
    ended(not_yet, [(1.0, 1.0), (0.02, 0.03), (0.04, 0.01)], "seconds")
    assert verdict(solved) == Verdict(error=0.0009, seconds=2.0)
    assert verdict(lucky) == Verdict(error=0.001, seconds=None)
    assert verdict(not_yet) == Verdict(error=0.03, seconds=None)
    assert verdict(RunFolder(tmp_path / "nothing")) is None


def test_the_table_says_who_solves_what(tmp_path: Path) -> None:
    shown = exhibit("sequences")
    ksd, hf, adam, _ = shown.of_rows(["addition"])
    ended(ksd.folder(tmp_path), [(1.0, 1.0), (0.0, 0.0004)], "solved")
    ended(hf.folder(tmp_path), [(1.0, 1.0), (0.5, 0.4871)], "seconds")
    ended(adam.folder(tmp_path), [(1.0, 1.0), (0.5, 0.5)], "interrupted")
    assert headings(shown) == ["KSD", "HF", "Adam", "SGD, clipped"]
    first, *others = lines(shown, tmp_path)
    assert first == ["addition", "2 s", "48.7%", "(50%)", "missing"]
    assert legend(shown, [first, *others]) == "in brackets: ended before its limit"
    assert legend(shown, others) is None


def test_the_legend_is_there_where_a_limit_ended_runs() -> None:
    shown = exhibit("table2")
    plain = [["curves"], ["HF", "-", "1", "", ""], ["KSD", "1", "1", "0.5", "-"], ["L", "missing"]]
    assert legend(shown, plain) is None
    for time in ("≤ 0.5", "≥ 2", "-"):
        told = legend(shown, [*plain, ["KSD", "1", "1", time, "0.3"]])
        assert told == "≥/≤: a time limit ended one of the runs; -: both, or different ones"
