"""Runs of several seeds as one method: spreads, bands, the target, and what the sentences claim."""

import math
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from krylov_descent.laboratory.record import Row, RunFolder
from krylov_descent.laboratory.report import write_report
from krylov_descent.laboratory.report.bands import band
from krylov_descent.laboratory.report.comparison import Comparison, compare
from krylov_descent.laboratory.report.methods import Spread, spread
from krylov_descent.laboratory.report.reading import read_run
from tests.laboratory.example_runs import CLASSIFIER, config, rows, write_comparison, write_run
from tests.laboratory.report_page import report


def stairs(*errors: float, seconds: float = 1.0) -> list[Row]:
    """Rows at equal distances in time, with one error on all splits."""
    return [
        {"iteration": i, "seconds": i * seconds, "passes": 2.0 * i}
        | dict.fromkeys(("train", "validation", "test"), error)
        for i, error in enumerate(errors)
    ]


def seeds_of(
    root: Path, name: str, runs: list[list[Row]], ending: str | None = "seconds", **options: Any
) -> list[RunFolder]:
    return [
        write_run(
            root / f"{name}-{seed}",
            config(name, name.upper(), seed=seed, **options),
            metrics,
            ending=ending,
        )
        for seed, metrics in enumerate(runs)
    ]


def compared(folders: list[RunFolder], target: float | None = None) -> Comparison:
    (comparison,) = compare(map(read_run, folders), target)
    return comparison


def three_methods(root: Path) -> list[RunFolder]:
    """A is better than B for each seed, and C hardly learns."""
    return [
        *seeds_of(root, "c", [stairs(9, 8.5, 8.4), stairs(9, 8.6, 8.5)]),
        *seeds_of(root, "b", [stairs(9, 5, 3.05), stairs(9, 4, 3.2)]),
        *seeds_of(root, "a", [stairs(9, 3, 1), stairs(9, 2, 0.5), stairs(9, 4, 2)]),
    ]


def test_a_spread_keeps_what_is_not_finite() -> None:
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    assert spread([1.0, math.nan, None, 2.0]) == Spread(2.0, 1.0, math.inf, 3)
    assert spread([2.0, 1.0]) == Spread(2.0, 1.0, 2.0, 2)
    assert spread([None]) is None


def test_runs_that_differ_in_their_seed_alone_are_one_method(tmp_path: Path) -> None:
    folders = [
        *three_methods(tmp_path),
        *seeds_of(tmp_path / "other", "a", [stairs(9, 1)], dimension=4),
        *seeds_of(tmp_path / "twice", "b", [stairs(9, 1)]),  # the seed is there already
    ]
    methods = {m.label: [r.label for r in m.runs] for m in compared(folders).methods}
    assert methods["B in b-0"] == ["B in b-0, seed 0", "B in b-0, seed 1"]
    assert sorted(methods) == ["A", "A (dimension 4)", "B in b-0", "B in twice/b-0", "C"]


def test_numbers_of_a_method_are_of_the_runs_that_have_ended(tmp_path: Path) -> None:
    ended = seeds_of(tmp_path, "a", [stairs(9, 3), stairs(9, 2)])
    (tmp_path / "a-1" / "outcome.json").unlink()
    (method,) = compared(ended).methods
    assert method.result == Spread(3, 3, 3, 1)
    page = report(ended, tmp_path)
    assert page.data[0]["methods"][0]["note"] == "1 of 2 seeds"
    assert page.data[0]["methods"][0]["band"] is None
    assert "A, seed 1: unfinished, at iteration 1." in page.text
    assert page.row("A 2 seeds")[-1].count("1 × ") == 2


def test_a_band_is_the_range_of_all_seeds_at_each_moment(tmp_path: Path) -> None:
    metrics = [rows(steps=30, seconds=s, rate=r) for s, r in ((9.0, 4.0), (11.0, 5.0), (13.0, 6.0))]
    (method,) = compared(seeds_of(tmp_path, "a", metrics)).methods
    found = band(method.counted, "seconds", "test")
    assert found.x[0] == 0.0
    assert found.x[-1] == 13.0
    for at, low, middle, high in zip(found.x, found.low, found.middle, found.high, strict=True):
        held = sorted([r["test"] for r in each if r["seconds"] <= at][-1] for each in metrics)
        assert [low, middle, high] == held
    few = band(method.counted, "seconds", "test", most=10)
    assert len(few.x) == 10
    assert {few.x[0], few.x[-1]} == {0.0, 13.0}
    metrics[1][3]["test"] = math.nan
    gap = compared(seeds_of(tmp_path / "gap", "a", metrics)).methods[0]
    broken = band(gap.counted, "seconds", "test")
    missing = [x for x, y in zip(broken.x, broken.middle, strict=True) if y is None]
    assert missing[0] == metrics[1][3]["seconds"]
    assert missing[-1] < metrics[1][4]["seconds"]


def test_the_target_is_what_half_of_those_that_learnt_reach(tmp_path: Path) -> None:
    comparison = compared(three_methods(tmp_path))
    assert [method.label for method in comparison.methods] == ["A", "B", "C"]
    assert comparison.target == 3.2  # B's median, with two digits
    times = [method.seconds_to(3.2) for method in comparison.methods]
    assert times[:2] == [Spread(1.0, 1.0, 2.0, 3), Spread(2.0, 2.0, 2.0, 2)]
    assert times[2] == Spread(math.inf, math.inf, math.inf, 2)
    page = report(three_methods(tmp_path / "again"), tmp_path)
    heads = next(row for row in page.rows if row and row[0] == "train")
    assert heads[6:8] == ["to 3.2", "in all"]
    assert page.row("A 3 seeds")[7] == "1.0 s1.0 s – 2.0 s"
    assert page.row("C 2 seeds")[7] == "not reached"
    assert "To a test error of 3.2 it took A 1.0 s and B 2.0 s." in page.text
    assert page.data[0]["methods"][2]["seconds_to_target"] == [None, None, None]


@pytest.mark.parametrize(("error", "target"), [(3.05, 3.1), (0.0712, 0.072), (120.0, 120.0)])
def test_the_target_has_two_digits(tmp_path: Path, error: float, target: float) -> None:
    folders = [
        *seeds_of(tmp_path, "a", [stairs(900, error)]),
        *seeds_of(tmp_path, "b", [stairs(900, error / 2)]),
    ]
    assert compared(folders).target == target


def test_a_target_can_be_named(tmp_path: Path) -> None:
    folders = three_methods(tmp_path)
    write_report(folders, tmp_path / "r.html", target=0.6)
    text = (tmp_path / "r.html").read_text()
    assert "No method reached a test error of 0.6." in text
    assert "target 0.6" in text
    others = [*folders, write_run(tmp_path / "other", config(problem=CLASSIFIER))]
    with pytest.raises(ValueError, match="is an error of one problem, and the runs are of 2"):
        write_report(others, tmp_path / "r.html", target=0.6)


def test_no_method_is_called_the_best_by_one_run(tmp_path: Path) -> None:
    text = unescape(report(write_comparison(tmp_path), tmp_path).text)
    assert "lowest test error" not in text
    assert "Test errors: KSD (dimension 20, curvature gauss-newton) 0.123, HF 0." in text
    assert "ksd compare --seeds 3 repeats each" in text
    assert "Published test errors: KSD 0.25 and HF 0.19 (A paper 2011, Table 2)." in text
    assert "L-BFGS: unfinished, at iteration 47." in text


def test_the_best_of_several_seeds_is_named_with_its_range(tmp_path: Path) -> None:
    text = report(three_methods(tmp_path), tmp_path).text
    assert "A has the lowest test error: 1 (0.500 to 2 over 3 seeds)." in text
    assert "B follows with 3.20 (3.05 to 3.20 over 2 seeds)." in text
    near = [
        *seeds_of(tmp_path / "near", "a", [stairs(9, 1), stairs(9, 3)]),
        *seeds_of(tmp_path / "near", "b", [stairs(9, 3), stairs(9, 4)]),
    ]
    text = report(near, tmp_path).text
    assert "The lowest test errors overlap from seed to seed: A 3 (1 to 3 over 2 seeds)" in text


def test_curves_are_steps_without_a_script(tmp_path: Path) -> None:
    page = report(three_methods(tmp_path), tmp_path)
    drawn = [(str(a["class"]).split()[0], a) for _, a in page.attributes if "class" in a]
    kinds = [kind for kind, _ in drawn]
    assert kinds.count("curve") == kinds.count("band") == kinds.count("label") == 3
    curves = [str(attributes["d"]) for kind, attributes in drawn if kind == "curve"]
    for curve in curves:
        places = [tuple(map(float, corner.split())) for corner in curve[1:].split("L")]
        assert len(places) >= 5
        for (x, y), (u, v) in pairwise(places):  # across or down, never both
            assert x == u or y == v
