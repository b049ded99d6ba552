"""Which runs there are, how a learning rate is chosen, and what the tables say of them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.environment import UnavailableError, describe, version_of
from benchmarks.parts import Section, Sections
from benchmarks.records import write
from benchmarks.target import cells, figures, measuring, methods, tables

CPU = torch.device("cpu")
ADAM = methods.METHODS["adam"]


def test_the_runs_of_the_goals_come_first() -> None:
    names = list(cells.cells_of("cuda"))
    assert names[:3] == [f"curves.ksd.seed-{seed}" for seed in (0, 1, 2)]
    assert names[6:10] == [f"curves.adam.rate-{rate}" for rate in (0.002, 0.004, 0.008, 0.016)]
    goals = ("ksd", "adam", "ksd-diagonal", "ksd-float32", "adam-tf32", "hf-tf32")
    first = [name for name in names if name.split(".")[1] in goals and "classifier" not in name]
    assert names[: len(first)] == first


def test_every_method_has_at_most_four_rates_and_three_seeds_on_every_problem() -> None:
    found = cells.cells_of("cuda").values()
    for race in cells.RACES["cuda"]:
        for method in methods.METHODS:
            mine = [cell for cell in found if (cell.race, cell.method) == (race, method)]
            stages = [cell.stage for cell in mine]
            # Forms of a method are there for the goals alone, and take over its learning rate.
            form = methods.METHODS[method].kind is not None
            assert stages.count("seed") == (0 if form and race not in cells.FIRST_RACES else 3)
            assert stages.count("rate") == (4 if methods.METHODS[method].own_rate else 0)
            assert {cell.seed for cell in mine if cell.stage == "rate"} <= {0}


def test_a_short_run_has_a_quarter_of_the_budget() -> None:
    race = cells.RACES["cuda"]["curves"]
    short = cells.Cell(race="curves", method="adam", stage="rate", rate=0.001)
    whole = cells.Cell(race="curves", method="adam", stage="seed", seed=1)
    assert short.seconds(race) == race.seconds / 4
    assert whole.seconds(race) == race.seconds
    assert cells.expected_seconds(whole.name, torch.device("cuda")) > race.seconds


def short_run(error: float | None, seconds: float | None = None) -> Section:
    """What is read of a run that tries a rate: its last error, and when it was at the target."""
    return {"last": {"train": error}, "reached": {"train": seconds}}


def test_the_best_rate_is_that_of_the_lowest_error_that_is_a_number() -> None:
    assert cells.best_rate({1.0: short_run(0.5), 2.0: short_run(0.3), 3.0: short_run(None)}) == 2.0
    with pytest.raises(UnavailableError, match="every learning rate"):
        cells.best_rate({1.0: short_run(None)})


def test_of_rates_that_end_alike_the_fastest_is_the_best() -> None:
    runs = {1.0: short_run(0.0, 3.0), 2.0: short_run(0.0, 2.0), 3.0: short_run(0.0)}
    assert cells.best_rate(runs) == 2.0
    assert cells.best_rate(runs | {4.0: short_run(-1.0)}) == 4.0


def test_a_full_run_waits_for_all_short_ones(tmp_path: Path) -> None:
    whole = cells.Cell(race="curves", method="adam", stage="seed", seed=1)
    for rate, error in zip(ADAM.rates[:3], (3.0, 1.0, 2.0), strict=True):
        short = cells.Cell(race="curves", method="adam", stage="rate", rate=rate)
        write(tmp_path / f"{short.name}.json", short_run(error))
    with pytest.raises(UnavailableError, match=r"not tuned yet: curves.adam.rate-0.016 is missing"):
        cells.rate_of(whole, ADAM, tmp_path)
    write(tmp_path / "curves.adam.rate-0.016.json", short_run(None))
    assert cells.rate_of(whole, ADAM, tmp_path) == ADAM.rates[1]
    in_tf32 = cells.Cell(race="curves", method="adam-tf32", stage="seed")
    assert cells.rate_of(in_tf32, methods.METHODS["adam-tf32"], tmp_path) == ADAM.rates[1]
    own = cells.Cell(race="curves", method="adam", stage="rate", rate=0.5)
    assert cells.rate_of(own, ADAM, tmp_path) == 0.5
    assert cells.rate_of(whole, methods.METHODS["ksd"], tmp_path) is None


def test_forms_of_other_precision_are_for_gpus() -> None:
    assert "adam-tf32" in methods.methods_of("cuda")
    assert all(method.tf32 is None for method in methods.methods_of("cpu").values())
    assert "muon" not in methods.methods_of("cpu")
    plain = methods.settings_of("ksd", "mnist-autoencoder")
    assert plain["tf32"]
    assert methods.settings_of("ksd-float32", "mnist-autoencoder") == {**plain, "tf32": False}
    assert methods.settings_of("adam-tf32", "mnist-autoencoder") == {}
    assert methods.settings_of("hf-tf32", "mnist-autoencoder") == {"tf32": True}


def test_a_method_whose_library_is_missing_is_named() -> None:
    with pytest.raises(UnavailableError, match="no-such-package is not installed"):
        methods.Method(title="x", distribution="no-such-package").require()


def test_ksd_has_the_settings_of_table_2_and_small_forms_the_defaults() -> None:
    best, diagonal = (methods.settings_of(name, "curves") for name in ("ksd", "ksd-diagonal"))
    assert best["preconditioner"] == "kronecker"
    assert diagonal["preconditioner"] == "fisher-diagonal"
    assert best["dimension"] < diagonal["dimension"]
    assert methods.settings_of("ksd", None) == {}
    assert methods.settings_of("hf", "curves") == {}


def test_a_warm_up_goes_on_until_the_factors_have_come() -> None:
    assert methods.first_steps(methods.settings_of("ksd", "mnist-classifier")) == 2
    assert methods.first_steps(methods.settings_of("ksd", "curves")) == 12


def test_precisions_are_compared_where_the_settings_are_alike() -> None:
    def sections(dimension: int) -> dict[str, Any]:
        return {
            "curves.ksd.seed-0": {"options": {"dimension": 40, "tf32": True}},
            "curves.ksd-float32.seed-0": {"options": {"dimension": dimension, "tf32": False}},
        }

    assert list(figures._matched(sections(40))) == ["curves"]
    assert not figures._matched(sections(80))


def test_the_time_to_an_error_is_that_of_the_first_row_below_it() -> None:
    rows = [{"seconds": float(i), "train": error} for i, error in enumerate((9.0, 3.0, 4.0, 1.0))]
    assert measuring.reached(rows, "train", 3.0) == 1.0
    assert measuring.reached(rows, "train", 0.5) is None


def test_curves_are_thinned_and_keep_the_beginning_and_the_end() -> None:
    rows = [{"seconds": float(i)} for i in range(1001)]
    found = [row["seconds"] for row in measuring.thinned(rows, 10)]
    assert found == [0, 1, 2, 4, 8, 16, 32, 63, 126, 251, 501, 1000]
    found = [row["seconds"] for row in measuring.thinned(rows, 100)]
    assert found[:12] == list(range(12))
    assert measuring.thinned(rows[:1]) == rows[:1]
    assert measuring.thinned(rows[:3]) == rows[:3]


def run_of(method: str, seed: int, train: float | None, test: float | None) -> dict[str, Any]:
    return {
        "environment": describe(CPU),
        "rate": 0.001 if methods.METHODS[method].rates else None,
        "reached": {"train": train, "test": test},
        "ending": "seconds",
        "last": {"seconds": 9.0, "train": 0.5 + seed, "test": 0.75},
        "curve": [[0.0, 0.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0], [9.0, 20.0, 0.5, 0.75]],
    }


@pytest.fixture
def sections() -> Sections:
    found = {}
    for seed in cells.SEEDS:
        found[f"curves.ksd.seed-{seed}"] = run_of("ksd", seed, 2.0 + seed, None)
        found[f"curves.adam.seed-{seed}"] = run_of("adam", seed, 1.5, 5.0 if seed else None)
    found["curves.hf.seed-0"] = run_of("hf", 0, 8.0, 8.0)
    return found


def test_the_table_says_what_was_reached_what_was_not_and_what_is_missing(
    sections: Sections,
) -> None:
    lines = tables.target_table(sections, CPU).splitlines()
    start = next(i for i, line in enumerate(lines) if "CURVES" in line)
    curves = lines[start : start + 9]
    assert (
        "| KSD | – | 3.00 s (2.00 s to 4.00 s) | 1.00 | not reached | – | 1.5 / 0.75 | 0.75 |"
        in curves
    )
    adam = "| Adam | 0.001 | 1.50 s (1.50 s to 1.50 s) | 0.50 | 5.00 s (5.00 s to not reached) |"
    assert any(line.startswith(adam) for line in curves)
    assert any("| HF | – | 8.00 s, 1 of 3 seeds" in line for line in curves)
    assert any(line.startswith("Missing: L-BFGS, Nonlinear CG, AdamW") for line in curves)


def test_the_profile_compares_with_the_fastest_on_each_target(sections: Sections) -> None:
    found = figures.ratios(sections, "cpu")
    # Targets: training error (both reach it) and test error (Adam in the median, KSD never).
    assert found["ksd"] == [2.0, math.inf]
    assert found["adam"] == [1.0, 1.0]
    assert found["hf"] == [8.0 / 1.5, 1.6]  # of its one seed
    del sections["curves.hf.seed-0"]
    assert list(figures.ratios(sections, "cpu")) == ["ksd", "adam"]


def test_the_figures_are_drawn(sections: Sections, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ready = {stem: figure for stem, figure in figures.FIGURES.items() if figure.ready(sections)}
    assert list(ready) == ["target-curves", "target-profile"]
    for stem, figure in ready.items():
        figure.draw(sections, CPU, tmp_path / f"{stem}.svg")
    assert "L-BFGS" not in (tmp_path / "target-curves.svg").read_text()
    assert "Adam" in (tmp_path / "target-curves.svg").read_text()
    assert "HF (1 of 3 seeds)" in (tmp_path / "target-profile.svg").read_text()


def test_the_missing_library_is_the_one_that_is_asked_for() -> None:
    soap = methods.METHODS["soap"]
    assert soap.distribution == "pytorch_optimizer"
    if version_of(soap.distribution) is None:
        with pytest.raises(UnavailableError, match="pytorch_optimizer"):
            soap.require()
