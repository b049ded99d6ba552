from pathlib import Path

import numpy as np
import pytest

from krylov_descent.laboratory.choices import UnknownNameError
from krylov_descent.laboratory.replays import LAST_FRAME, NEVER, features, read_games
from krylov_descent.laboratory.sources import DataError
from tests.laboratory.replay_files import write_side

TERRAN = [
    ((100, 7143), "Rush"),
    ((-1, 7144), "Drop"),
    ((100, 7143), "Rush"),  # both players' rows again
    ((300, -1), "Expand"),
    ((100, 7143), "Rush"),  # the Terran's row again
    ((500, 60), "Drop"),  # the Zerg's row again
]
ZERG = [
    ((10, 20, 30), "Drop"),
    ((40, 50, 60), "Drop"),
    ((10, 20, 30), "Drop"),
    ((70, -1, 90_000), "Rush"),
    ((11, 21, 31), "Drop"),
    ((70, -1, 90_000), "Rush"),
]


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    write_side(monkeypatch, tmp_path, "TvZ", "Terran", TERRAN)
    write_side(monkeypatch, tmp_path, "TvZ", "Zerg", ZERG)
    write_side(monkeypatch, tmp_path, "ZvZ", "Zerg", ZERG)
    return tmp_path


def test_games_are_read_once_and_to_the_fifth_minute(folder: Path) -> None:
    assert LAST_FRAME == 7_143
    games = read_games("TvZ", folder=folder)
    assert games.events == ("Terran0", "Terran1", "Zerg0", "Zerg1", "Zerg2")
    assert games.frames.tolist() == [
        [100, 7143, 10, 20, 30],
        [NEVER, NEVER, 40, 50, 60],
        [300, NEVER, 70, NEVER, NEVER],
    ]
    assert [games.classes[i] for i in games.strategies] == ["Rush", "Drop", "Expand"]


def test_the_opponent_comes_first_and_may_be_seen_alone(folder: Path) -> None:
    games = read_games("TvZ", opponent="Zerg", folder=folder)
    assert games.events == ("Zerg0", "Zerg1", "Zerg2", "Terran0", "Terran1")
    assert [games.classes[i] for i in games.strategies] == ["Drop", "Drop", "Rush"]
    alone = read_games("TvZ", opponent="Zerg", observed="opponent", folder=folder)
    assert alone.events == games.events[:3]
    # Which games are duplicates does not depend on what is seen of them.
    np.testing.assert_array_equal(alone.frames, games.frames[:, :3])


def test_a_mirror_matchup_shows_the_opponent_alone(folder: Path) -> None:
    games = read_games("ZvZ", folder=folder)
    assert games.frames.tolist() == [
        [10, 20, 30],
        [40, 50, 60],
        [70, NEVER, NEVER],
        [11, 21, 31],
    ]
    with pytest.raises(ValueError, match="`observed` must be 'opponent' in ZvZ"):
        read_games("ZvZ", observed="both", folder=folder)


def test_names_that_do_not_exist_are_answered_with_the_nearest(folder: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown matchup 'TvX'.* Known: PvP"):
        read_games("TvX", folder=folder)
    with pytest.raises(UnknownNameError, match="Unknown race in TvZ 'terran'"):
        read_games("TvZ", opponent="terran", folder=folder)
    with pytest.raises(ValueError, match="`observed` must be 'both' or 'opponent'"):
        read_games("TvZ", observed="mine", folder=folder)  # type: ignore[arg-type]


def test_files_of_different_lengths_are_refused(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    write_side(monkeypatch, folder, "TvZ", "Zerg", ZERG[:4])
    with pytest.raises(DataError, match="do not fit: they have 6 and 4 rows"):
        read_games("TvZ", folder=folder)


def test_a_damaged_line_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    path = write_side(monkeypatch, folder, "TvZ", "Zerg", [*ZERG[:5], ((1, 2), "Rush")])
    with pytest.raises(DataError, match=f"{path}, line 12: expected 4 fields, found 3"):
        read_games("TvZ", folder=folder)


def test_features_are_presence_time_and_order() -> None:
    frames = np.array([[7143, 0, NEVER, NEVER], [10, 10, 20, NEVER]])
    presence = [[1, 1, 0, 0], [1, 1, 1, 0]]
    time = [[1, 0, 0, 0], [10 / 7143, 10 / 7143, 20 / 7143, 0]]
    # of the pairs 01, 02, 03, 12, 13, 23
    order = [[-1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]]
    expected = np.concatenate([presence, time, order], axis=1)
    found = features(frames)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_order_says_what_two_sorted_lists_say() -> None:
    """Every pair beside a plain comparison of the two events."""
    generator = np.random.default_rng(1)
    frames = np.where(generator.random((20, 6)) < 0.3, NEVER, generator.integers(0, 9, (20, 6)))
    order = features(frames)[:, 12:]
    for row, game in enumerate(frames):
        keys = [99 if frame == NEVER else frame for frame in game.tolist()]
        pairs = [(keys[i], keys[j]) for i in range(6) for j in range(i + 1, 6)]
        said = [1 if one < other else -1 if one > other else 0 for one, other in pairs]
        assert order[row].tolist() == said
