"""Which runs there are, how a learning rate is chosen, and what the tables say of them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.environment import (
    UnavailableError,
    describe,
    device_name,
    physical_cores,
    version_of,
)
from benchmarks.parts import NOT_MEASURED, Section, Sections, Setting
from benchmarks.records import write
from benchmarks.target import cells, choices, disturbance, figures, measuring, methods, tables
from benchmarks.target.gap import gap_table

CPU = torch.device("cpu")
ADAM = methods.METHODS["adam"]


def test_the_runs_of_the_goals_come_first() -> None:
    names = list(cells.cells_of("cuda"))
    assert names[:3] == [f"curves.ksd.seed-{seed}" for seed in (0, 1, 2)]
    assert names[6:12] == [
        *(f"curves.adam.rate-{rate}" for rate in ADAM.rates),
        "curves.adam.decay-1.0",
        "curves.adam.decay-0.25",
    ]
    goals = ("ksd", "adam", "adam-tf32", "hf-tf32")
    first = [name for name in names if name.split(".")[1] in goals and "classifier" not in name]
    assert names[: len(first)] == first


def test_every_method_with_a_rate_has_six_tries_and_three_seeds_on_every_problem() -> None:
    names = list(cells.cells_of("cuda"))
    found = cells.cells_of("cuda").values()
    for race in cells.RACES["cuda"]:
        for method, described in methods.METHODS.items():
            mine = [cell for cell in found if (cell.race, cell.method) == (race, method)]
            stages = [cell.stage for cell in mine]
            # Forms of a method are there for the goals alone, and take over its learning rate.
            form = described.kind is not None
            assert stages.count("seed") == (0 if form and race not in cells.FIRST_RACES else 3)
            assert stages.count("rate") == (4 if described.own_rate else 0)
            assert len([s for s in stages if s != "seed"]) == (6 if described.own_rate else 0)
            # They are not chosen with a seed that counts.
            tries = {cell.seed for cell in mine if cell.stage != "seed"}
            assert not tries & set(cells.SEEDS)
            if form and described.rates and stages:
                assert names.index(f"{race}.{method}.seed-0") > max(
                    names.index(cell.name)
                    for cell in cells.second_tries(race, described.kind or "")
                )


def test_a_try_takes_its_part_of_the_budget() -> None:
    def part(stage: Any, value: float) -> float:
        return cells.Cell(race="curves", method="adam", stage=stage, value=value).part

    assert part("rate", 0.004) == cells.MIDDLE
    assert part("decay", 0.25) == 0.25
    assert part("near", 1.4) == cells.MIDDLE
    seconds = cells.RACES["cpu"]["curves"].seconds
    whole = cells.expected_seconds("curves.adam.seed-1", CPU)
    assert seconds < whole < 1.6 * seconds
    # The first steps are timed in a process of their own.
    assert cells.expected_seconds("curves.adam.seed-0", CPU) > whole
    assert cells.expected_seconds("curves.adam.decay-0.25", CPU) < whole / 2


def tried(
    rate: float, error: float | None, seconds: float | None = None, decay: float | None = 0.5
) -> Section:
    """What is read of a try: its setting, its last error, and when it was at the target."""
    return {
        "rate": rate,
        "decay": decay,
        "last": {"train": error},
        "reached": {"train": seconds},
    }


def test_the_best_try_is_the_fastest_to_the_training_error() -> None:
    runs = [tried(1.0, 0.0, 3.0), tried(2.0, 0.5, 2.0), tried(3.0, 0.0)]
    assert choices.best(runs) == choices.Choice(2.0, 0.5)


def test_where_no_try_reaches_it_the_best_has_the_lowest_error_that_is_a_number() -> None:
    runs = [tried(1.0, 0.5), tried(2.0, 0.3, decay=0.25), tried(3.0, None)]
    assert choices.best(runs) == choices.Choice(2.0, 0.25)
    with pytest.raises(UnavailableError, match="every learning rate"):
        choices.best([tried(1.0, None)])


def write_tries(folder: Path, tries: list[cells.Cell], runs: list[Section]) -> None:
    for cell, run in zip(tries, runs, strict=True):
        write(folder / f"{cell.name}.json", run)


def test_decays_are_tried_with_the_best_rate_and_seeds_have_the_best_of_all(
    tmp_path: Path,
) -> None:
    whole = cells.Cell(race="curves", method="adam", stage="seed", seed=1)
    first, second = (f("curves", "adam") for f in (cells.first_tries, cells.second_tries))
    assert choices.choice_of(first[2], tmp_path) == choices.Choice(ADAM.rates[2], 0.5)
    write_tries(tmp_path, first[:3], [tried(ADAM.rates[i], 3.0 - i) for i in range(3)])
    for waiting in (second[0], whole):
        with pytest.raises(UnavailableError, match=r"curves.adam.rate-0.03 is missing"):
            choices.choice_of(waiting, tmp_path)
    write_tries(tmp_path, first[3:], [tried(ADAM.rates[3], None)])
    assert choices.choice_of(second[0], tmp_path) == choices.Choice(ADAM.rates[2], 1.0)
    with pytest.raises(UnavailableError, match=r"curves.adam.decay-1.0 is missing"):
        choices.choice_of(whole, tmp_path)
    quick = tried(ADAM.rates[2], 7.0, 4.0, decay=0.25)
    write_tries(tmp_path, second, [tried(ADAM.rates[2], 0.1, decay=1.0), quick])
    assert choices.choice_of(whole, tmp_path) == choices.Choice(ADAM.rates[2], 0.25)
    in_tf32 = cells.Cell(race="curves", method="adam-tf32", stage="seed", seed=0)
    assert choices.choice_of(in_tf32, tmp_path) == choices.Choice(ADAM.rates[2], 0.25)
    ksd = cells.Cell(race="curves", method="ksd", stage="seed", seed=0)
    assert choices.choice_of(ksd, tmp_path) is None


def test_a_method_without_decay_tries_rates_beside_the_best_one(tmp_path: Path) -> None:
    first, second = (f("curves", "schedule-free") for f in (cells.first_tries, cells.second_tries))
    assert choices.choice_of(first[0], tmp_path) == choices.Choice(first[0].value, None)
    write_tries(tmp_path, first, [tried(c.value, c.value, decay=None) for c in first])
    lowest = first[0].value
    assert [choices.choice_of(cell, tmp_path) for cell in second] == [
        choices.Choice(0.7 * lowest, None),
        choices.Choice(1.4 * lowest, None),
    ]


def test_tries_that_were_made_before_decays_were_tried_do_not_choose(tmp_path: Path) -> None:
    first = cells.first_tries("curves", "adam")
    old = {key: value for key, value in tried(0.002, 1.0).items() if key != "decay"}
    write_tries(tmp_path, first, [old] * 4)
    with pytest.raises(UnavailableError, match="remove it"):
        choices.choice_of(cells.second_tries("curves", "adam")[0], tmp_path)


def test_the_time_to_beat_is_that_of_the_other_tries(tmp_path: Path) -> None:
    first = cells.first_tries("curves", "adam")
    assert choices.time_to_beat(first[0], tmp_path) == math.inf
    write_tries(tmp_path, first[:2], [tried(0.002, 1.0, 2.0), tried(0.004, 1.0, 3.0)])
    assert choices.time_to_beat(first[1], tmp_path) == 2.0
    assert choices.time_to_beat(first[0], tmp_path) == 3.0


def test_forms_of_other_precision_are_for_gpus() -> None:
    assert "adam-tf32" in methods.methods_of("cuda")
    assert all(method.tf32 is None for method in methods.methods_of("cpu").values())
    assert "muon" not in methods.methods_of("cpu")
    assert methods.settings_of("ksd") == {}  # it chooses by itself
    assert methods.settings_of("hf") == {}
    assert methods.settings_of("adam-tf32") == {}
    assert methods.settings_of("hf-tf32") == {"tf32": True}
    for form, kind in (("adam-tf32", "adam"), ("soap-tf32", "soap"), ("muon-tf32", "muon")):
        described = methods.METHODS[form]
        assert (described.kind, described.tf32) == (kind, True)
        assert described.rates == methods.METHODS[kind].rates


def test_a_method_whose_library_is_missing_is_named() -> None:
    with pytest.raises(UnavailableError, match="no-such-package is not installed"):
        methods.Method(title="x", distribution="no-such-package").require()


def test_a_warm_up_goes_on_until_the_factors_have_come() -> None:
    assert methods.first_steps("hf") == 2
    assert methods.first_steps("ksd") == 12


def test_the_time_to_an_error_is_that_of_the_first_row_below_it() -> None:
    rows = [{"seconds": float(i), "train": error} for i, error in enumerate((9.0, 3.0, 4.0, 1.0))]
    assert measuring.reached(rows, "train", 3.0) == 1.0
    assert measuring.reached(rows, "train", 0.5) is None


def test_curves_are_thinned_and_keep_the_beginning_and_the_end() -> None:
    rows = [{"seconds": float(i)} for i in range(1001)]
    found = [row["seconds"] for row in measuring.thinned(rows, 10)]
    assert found == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 511, 1000]
    found = [row["seconds"] for row in measuring.thinned(rows, 100)]
    assert found[:12] == list(range(12))
    assert measuring.thinned(rows[:1]) == rows[:1]
    assert measuring.thinned(rows[:3]) == rows[:3]


def counted(rates: list[tuple[float, float]], device: str = "here") -> Section:
    """A run of passes a second over so many seconds, one pair after the other."""
    curve = [[0.0, 0.0, 9.0, 9.0]]
    for passes, seconds in rates:
        curve.append([curve[-1][0] + seconds, curve[-1][1] + passes * seconds, 1.0, 1.0])
    last = dict(zip(cells.KEYS, curve[-1], strict=True))
    return {"curve": curve, "last": last, "environment": {"device": device}}


def test_a_run_with_less_than_half_of_the_passes_of_others_is_disturbed() -> None:
    others = [counted([(10.0, 20.0)]), counted([(8.0, 20.0)]), counted([(0.1, 20.0)])]
    assert disturbance.share(counted([(4.0, 20.0)]), others) == 0.5
    assert not disturbance.is_disturbed(counted([(4.0, 20.0)]), others)
    assert disturbance.is_disturbed(counted([(3.9, 20.0)]), others)
    assert not disturbance.is_disturbed(counted([(0.1, 20.0)]), [])


def test_runs_are_compared_over_the_same_time() -> None:
    slow_at_first = [(1.0, 5.0), (10.0, 15.0)]
    # A try that was over after 5 s has no part in the faster steps.
    assert disturbance.share(counted([(1.0, 5.0)]), [counted(slow_at_first)]) == 1.0
    # A run of a few steps tells nothing.
    assert disturbance.share(counted([(1.0, 0.1)]), [counted([(9.0, 20.0)])]) is None


def test_runs_on_other_devices_are_not_compared(tmp_path: Path) -> None:
    cell = cells.cells_of("cpu")["curves.adam.seed-1"]
    names = ("curves.adam.seed-0", "curves.adam.seed-1", "curves.adamw.seed-0")
    for name in names:
        write(tmp_path / f"{name}.json", counted([(9.0, 20.0)]))
    assert len(disturbance.other_runs(cell, "here", tmp_path)) == 1
    assert not disturbance.other_runs(cell, "there", tmp_path)


def test_a_try_with_a_slow_setting_says_nothing_about_other_runs(tmp_path: Path) -> None:
    cell = cells.cells_of("cpu")["curves.adam.seed-1"]
    slow = counted([(2.0, 20.0)]) | {"slow": True}
    disturbed, usual = counted([(2.0, 20.0)]), counted([(9.0, 20.0)])
    write(tmp_path / "curves.adam.rate-0.03.json", slow)
    write(tmp_path / "curves.adam.seed-0.json", usual)
    assert disturbance.is_disturbed(disturbed, disturbance.other_runs(cell, "here", tmp_path))
    sections = {f"curves.adam.{name}": slow for name in ("rate-0.03", "rate-0.012", "decay-1.0")}
    sections |= {"curves.adam.seed-0": usual, "curves.adam.seed-1": disturbed}
    assert disturbance.refused(sections) == ["curves.adam.seed-1"]


@pytest.fixture
def runs_of_adam(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What runs make in a second, one after the other, where nothing is really run."""
    speeds: list[float] = []
    monkeypatch.setattr(measuring, "_problem", lambda *_: None)
    monkeypatch.setattr(measuring, "_warm_up", lambda *_: 0.5)
    monkeypatch.setattr(measuring, "_in_a_fresh_process", lambda *_: 1.5)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(
        measuring, "run", lambda *_, **__: counted([(speeds.pop(0), 20.0)], device_name(CPU))
    )
    return speeds


def measured(folder: Path, section: str) -> Section:
    found = measuring.measure(section, Setting(device=CPU, repeats=1, folder=folder))
    write(folder / f"{section}.json", found)
    return found


def test_runs_have_no_denormal_numbers_and_a_thread_for_each_core() -> None:
    before, tiny = torch.get_num_threads(), torch.full((4,), 1e-40)
    try:
        with measuring._even_terms():
            assert torch.get_num_threads() == physical_cores()
            flushed = torch.set_flush_denormal(True)  # says whether the processor can
            assert not flushed or not (tiny * 0.5).any()
        assert (tiny * 0.5).any()
    finally:
        torch.set_num_threads(before)


def test_a_disturbed_run_is_repeated_once(
    tmp_path: Path, runs_of_adam: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    runs_of_adam += [10.0, 4.0, 9.0]
    first = measured(tmp_path, "curves.ksd.seed-0")
    assert first["first_steps_seconds"] == 1.5
    second = measured(tmp_path, "curves.ksd.seed-1")
    assert second["last"]["passes"] == 180
    assert second["first_steps_seconds"] is None
    assert "refused: 40% of the passes" in capsys.readouterr().out


def test_a_run_that_is_disturbed_twice_is_an_error(
    tmp_path: Path, runs_of_adam: list[float]
) -> None:
    runs_of_adam += [10.0, 4.0, 4.0]
    measured(tmp_path, "curves.ksd.seed-0")
    with pytest.raises(measuring.DisturbedError, match=r"seed-1 made less than 50%.* 2 times"):
        measured(tmp_path, "curves.ksd.seed-1")
    assert not (tmp_path / "curves.ksd.seed-1.json").exists()


def test_a_run_that_later_ones_show_to_be_disturbed_is_made_again(
    tmp_path: Path, runs_of_adam: list[float]
) -> None:
    runs_of_adam += [2.0, 10.0, 9.0]
    for seed in cells.SEEDS:
        measured(tmp_path, f"curves.ksd.seed-{seed}")
    setting = Setting(device=CPU, repeats=1, folder=tmp_path)
    stale = [seed for seed in cells.SEEDS if measuring.is_stale(f"curves.ksd.seed-{seed}", setting)]
    assert stale == [0]


def test_a_run_with_a_setting_that_is_not_the_best_is_made_again(tmp_path: Path) -> None:
    setting = Setting(device=CPU, repeats=1, folder=tmp_path)
    run = counted([(9.0, 20.0)])
    write(tmp_path / "curves.adam.seed-0.json", {**run, "rate": 0.004})
    assert measuring.is_stale("curves.adam.seed-0", setting)  # before decays were tried
    write(tmp_path / "curves.adam.seed-0.json", {**run, "rate": 0.004, "decay": 0.5})
    assert not measuring.is_stale("curves.adam.seed-0", setting)
    tries = [*cells.first_tries("curves", "adam"), *cells.second_tries("curves", "adam")]
    rates = (*ADAM.rates, 0.002, 0.002)
    decays = (0.5, 0.5, 0.5, 0.5, 1.0, 0.25)
    runs = [run | tried(r, r, decay=d) for r, d in zip(rates, decays, strict=True)]
    for one in runs:
        one["last"] |= {"seconds": 20.0}
    write_tries(tmp_path, tries, runs)
    assert measuring.is_stale("curves.adam.seed-0", setting)
    write(tmp_path / "curves.adam.seed-0.json", {**run, "rate": 0.002, "decay": 0.5})
    assert not measuring.is_stale("curves.adam.seed-0", setting)


def run_of(method: str, seed: int, train: float | None, test: float | None) -> dict[str, Any]:
    return {
        "environment": describe(CPU),
        "rate": 0.001 if methods.METHODS[method].rates else None,
        "reached": {"train": train, "test": test},
        "ending": "seconds",
        "last": {"seconds": 9.0, "passes": 18.0, "train": 0.5 + seed, "test": 0.75},
        "curve": [[0.0, 0.0, 9.0, 9.0], [1.0, 2.0, 3.0, 4.0], [9.0, 18.0, 0.5, 0.75]],
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
        "| KSD | – | 3.00 s (2.00 s to 4.00 s) | 1.00 | not reached | – | 1.5 / 0.75 | 0.75 | 2 |"
        in curves
    )
    adam = "| Adam | 0.001 | 1.50 s (1.50 s to 1.50 s) | 0.50 | 5.00 s (5.00 s to not reached) |"
    assert any(line.startswith(adam) for line in curves)
    assert any("| HF | – | 8.00 s, 1 of 3 seeds" in line for line in curves)
    assert any(line.startswith("Missing: L-BFGS, Nonlinear CG, AdamW") for line in curves)


def test_old_records_have_no_columns_of_what_they_do_not_know(sections: Sections) -> None:
    text = tables.target_table(sections, CPU)
    assert "| decay |" not in text
    assert tables.FIRST_STEPS not in text
    assert "quarter of the time, with one seed" in text
    assert "Rates: ." in text


def test_the_caption_has_the_rates_that_were_tried(sections: Sections) -> None:
    for rate in (0.01, 0.003):
        sections[f"curves.adam.rate-{rate}"] = {**run_of("adam", 0, 1.5, None), "rate": rate}
    assert "Rates: Adam: 0.003, 0.01. " in tables.target_table(sections, CPU)


def test_the_table_has_the_decay_the_passes_and_the_first_steps(sections: Sections) -> None:
    for seed in cells.SEEDS:
        adam, ksd = (sections[f"curves.{name}.seed-{seed}"] for name in ("adam", "ksd"))
        adam |= {"decay": 0.25, "first_steps_seconds": None if seed else 2.345, "lowest_test": 0.6}
        ksd |= {"decay": None, "first_steps_seconds": None if seed else 11.5, "lowest_test": 0.7}
    lines = tables.target_table(sections, CPU).splitlines()
    head = next(line for line in lines if line.startswith("| method"))
    assert head.endswith(
        "| lowest test error | passes a second | first steps in a fresh process, s |"
    )
    (adam_row,) = (line for line in lines if line.startswith("| Adam "))
    assert adam_row.startswith("| Adam | 0.001 | quarter |")
    assert adam_row.endswith("| 0.6 | 2 | 2.35 |")
    assert any(line.startswith("| KSD | – | – |") and line.endswith("| 11.50 |") for line in lines)
    assert any(line.startswith("| HF | – | – |") and line.endswith("| – |") for line in lines)
    assert "the best of three, by the time to the training error" in lines[-1]


def test_a_disturbed_run_is_left_out_and_named(sections: Sections) -> None:
    slow = sections["curves.adam.seed-0"]
    slow["curve"] = [[s, p / 3, a, b] for s, p, a, b in slow["curve"]]
    slow["last"]["passes"] /= 3
    text = tables.target_table(sections, CPU)
    assert "Disturbed, and left out: curves.adam.seed-0." in text
    assert any("| Adam |" in line and "2 of 3 seeds" in line for line in text.splitlines())
    assert len(tables.seeds_of(sections, "curves", "adam")) == 2


def test_the_profile_compares_with_the_fastest_on_each_target(sections: Sections) -> None:
    found = figures.ratios(sections, "cpu")
    # Targets: training error (both reach it) and test error (Adam in the median, KSD never).
    assert found["ksd"] == [2.0, math.inf]
    assert found["adam"] == [1.0, 1.0]
    assert found["hf"] == [8.0 / 1.5, 1.6]  # of its one seed
    del sections["curves.hf.seed-0"]
    assert list(figures.ratios(sections, "cpu")) == ["ksd", "adam"]


def test_the_gap_is_read_where_a_run_first_has_a_training_error() -> None:
    def run(*errors: tuple[float, float]) -> Section:
        curve = [[float(i), float(i), *pair] for i, pair in enumerate(errors)]
        last = dict(zip(cells.KEYS, curve[-1], strict=True))
        return {"curve": curve, "last": last, "environment": {"device": "here"}}

    runs = [
        run((9.0, 9.0), (0.4, 0.5), (0.2, 0.9), (0.1, 0.13)),
        run((9.0, 9.0), (0.3, 0.6), (0.2, 0.9), (0.15, 0.2)),
    ]
    given = {f"curves.ksd.seed-{seed}": one for seed, one in enumerate(runs)}
    given["curves.adam.seed-0"] = run((9.0, 9.0), (5.0, 5.0))
    *_, line = gap_table(given, torch.device("cuda")).splitlines()
    assert line == "| KSD | 1.25, 2.00 | 1.30, – |"
    assert gap_table({}, CPU) == NOT_MEASURED


def test_the_figures_are_drawn(sections: Sections, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ready = {stem: figure for stem, figure in figures.FIGURES.items() if figure.ready(sections)}
    assert list(ready) == ["target-curves", "target-profile"]
    for stem, figure in ready.items():
        figure.draw(sections, CPU, tmp_path / f"{stem}.svg")
    assert "L-BFGS" not in (tmp_path / "target-curves.svg").read_text()
    assert "Adam" in (tmp_path / "target-curves.svg").read_text()
    assert "HF (1 of 3 seeds)" in (tmp_path / "target-profile.svg").read_text()


@pytest.mark.parametrize("method", ["soap", "schedule-free", "kron", "shampoo"])
def test_the_missing_library_is_the_one_that_is_asked_for(method: str) -> None:
    described = methods.METHODS[method]
    assert described.distribution == "pytorch_optimizer"
    if version_of(described.distribution) is None:
        with pytest.raises(UnavailableError, match="pytorch_optimizer"):
            described.require()
