"""On made-up games; on the real ones where KRYLOV_DESCENT_DATA names their folder."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from krylov_descent import KSD
from krylov_descent.laboratory.problems.problem import Problem
from krylov_descent.laboratory.problems.starcraft import SPLITS, load_starcraft, split_games
from krylov_descent.laboratory.replays import MATCHUPS, file_name, read_games
from krylov_descent.laboratory.sources import FOLDER_VARIABLE, data_folder
from tests.laboratory.replay_files import write_matchup

real_games = pytest.mark.skipif(
    not os.environ.get(FOLDER_VARIABLE) or not (data_folder() / file_name("TvZ", "Zerg")).exists(),
    reason=f"needs the real replays: set {FOLDER_VARIABLE} to the folder that holds starcraft/",
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    write_matchup(monkeypatch, tmp_path, games=120)
    return tmp_path


def parts(problem: Problem) -> list[int]:
    held_out = problem.validation[0] if problem.validation else ()
    return [len(problem.train[0]), len(held_out), len(problem.test[0])]


def test_the_problem_is_a_network_of_ten_units_on_all_features(folder: Path) -> None:
    problem = load_starcraft(folder=folder)
    assert parts(problem) == [96, 12, 12]
    sizes = [m.weight.shape for m in problem.make_model() if isinstance(m, torch.nn.Linear)]
    assert sizes == [(10, 2 * 7 + 21), (3, 10)]
    assert problem.title == "StarCraft, Terran in TvZ"
    assert problem.task == "classification"
    assert problem.paper is not None
    assert (problem.paper.krylov_dimension, problem.paper.bfgs_iterations) == (20, 30)
    assert problem.paper.curvature_samples == 96
    ksd, hf = problem.paper.row("KSD"), problem.paper.row("HF")
    assert (ksd.train, ksd.test, ksd.time) == (0.0, 0.05, 0.7)
    assert (hf.train, hf.test, hf.time) == (0.0, 0.11, 1.0)


def test_options_choose_side_and_size(folder: Path) -> None:
    zerg = load_starcraft(folder=folder, opponent="Zerg", observed="opponent", validation=0)
    assert parts(zerg) == [108, 0, 12]
    assert zerg.train[0].shape[1] == 2 * 3 + 3
    assert zerg.title == "StarCraft, Zerg in TvZ"
    assert set(zerg.train[1].tolist()) == {2}
    small = load_starcraft(folder=folder, size="small")
    assert small.train[0].shape[1] == 2 * 4 + 6
    assert small.paper is None
    assert small.title.endswith(", small")


def test_all_games_are_tested_on_once_in_the_ten_splits(folder: Path) -> None:
    tested = torch.cat([load_starcraft(folder=folder, split=i).test[0] for i in range(SPLITS)])
    games = read_games("TvZ", folder=folder)
    assert len(tested) == len(games.frames)
    assert len(torch.unique(tested, dim=0)) == len(games.frames)


@pytest.mark.parametrize("count", [1_000, 1_234, 915, 37])
def test_the_parts_of_a_split_are_disjoint_and_drawn_by_the_seed(count: int) -> None:
    for split in range(SPLITS):
        train, validation, test = split_games(count, seed=3, split=split)
        together = np.concatenate([train, validation, test])
        assert len(np.unique(together)) == len(together) == min(count, 1_000)
        assert len(validation) == len(test)
        np.testing.assert_array_equal(test, split_games(count, seed=3, split=split)[2])
        assert set(test) != set(split_games(count, seed=4, split=split)[2])
        if count >= 1_000:  # the paper's 900 and 100
            assert (len(train) + len(validation), len(test)) == (900, 100)


def test_the_test_part_does_not_depend_on_the_validation_part() -> None:
    default, none = split_games(300, 0, 2), split_games(300, 0, 2, validation=0)
    np.testing.assert_array_equal(default[2], none[2])
    assert len(none[1]) == 0
    assert set(none[0]) == {*default[0], *default[1]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": 10}, "`split` must be from 0 to 9, found 10"),
        ({"split": -1}, "`split` must be from 0 to 9"),
        ({"validation": 108}, "`validation` must be 0 or more and below 108 games, found 108"),
        ({"validation": -1}, "`validation` must be 0 or more"),
    ],
)
def test_what_cannot_be_split_is_refused(
    folder: Path, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_starcraft(folder=folder, **options)  # type: ignore[arg-type]


@real_games
@pytest.mark.parametrize(
    ("matchup", "games", "events"),
    [
        ("PvP", 467, 56),
        ("PvT", 824, 107),
        ("PvZ", 926, 104),
        ("TvT", 424, 51),
        ("TvZ", 915, 99),
        ("ZvZ", 918, 48),
    ],
)
def test_the_real_games_are_as_many_as_are_different(matchup: str, games: int, events: int) -> None:
    for race in MATCHUPS[matchup]:
        found = read_games(matchup, race)
        assert found.frames.shape == (games, events)
        assert len(found.classes) == 7
        assert len(np.unique(found.frames, axis=0)) == games


@real_games
def test_the_real_problem_is_learnt_better_than_by_guessing() -> None:
    problem = load_starcraft()
    assert problem.train[0].shape[1] == 5_049
    assert parts(problem) == [731, 92, 92]
    model = problem.make_model(seed=0)
    optimizer = KSD(model, problem.criterion, weight_decay=problem.weight_decay)
    for _ in range(4):
        optimizer.step(problem.train)
    guessing = 1 - problem.test[1].bincount().max() / len(problem.test[1])
    wrong = problem.metric.per_sample(model(problem.test[0]), problem.test[1]).mean()
    assert wrong < 0.75 * guessing
