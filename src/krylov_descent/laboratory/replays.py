"""StarCraft replays of Weber & Mateas 2009 as games: what was seen when, and which strategy it was.

There is a file for each match-up and race in it, with a row for each player and the frame of each
kind of event (a building, a unit, an upgrade) that he came to. The rows of a match-up's two files
are the two players of the same games.
"""

from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from krylov_descent.laboratory.arff import read_arff
from krylov_descent.laboratory.choices import unknown_name
from krylov_descent.laboratory.sources import DataError, locate

Observed = Literal["both", "opponent"]
# The races whose files there are. In a mirror match-up one file has both players' rows.
MATCHUPS = {
    "PvP": ("Protoss",),
    "PvT": ("Protoss", "Terran"),
    "PvZ": ("Protoss", "Zerg"),
    "TvT": ("Terran",),
    "TvZ": ("Terran", "Zerg"),
    "ZvZ": ("Zerg",),
}
FRAMES_PER_SECOND = 23.81
LAST_FRAME = int(300 * FRAMES_PER_SECOND)  # five minutes
NEVER = -1


@dataclass(frozen=True, eq=False)
class Games:
    """Different games of one match-up.

    Attributes:
        events: the names of what can happen, the opponent's first.
        frames: when it first did, int64 [games, events]; NEVER if not in the first five minutes.
        strategies: the opponent's, as an index into `classes`, int64 [games].
        classes: the names of the strategies.
    """

    events: tuple[str, ...]
    frames: npt.NDArray[np.int64]
    strategies: npt.NDArray[np.int64]
    classes: tuple[str, ...]


def file_name(matchup: str, race: str) -> str:
    """Where a race's replays of a match-up lie below the data folder."""
    return f"starcraft/scm{matchup}_{race}_Mid.arff"


def read_games(
    matchup: str,
    opponent: str | None = None,
    observed: Observed | None = None,
    folder: str | Path | None = None,
) -> Games:
    """The games of a match-up without duplicates, events after five minutes masked.

    Several players published the same replays. A game is a duplicate if either player's row, to
    the frame, was there before: such a pair, one on each side of a split, would be a leak.

    Args:
        matchup: one of `MATCHUPS`.
        opponent: the race whose strategy is asked for; by default the match-up's first.
        observed: whether "both" players' events are seen or the "opponent"'s alone; both by
            default, but the opponent's in a mirror match-up, whose file does not say who played
            whom.
        folder: see `sources.data_folder`; files that are not there are downloaded.

    Raises:
        DataError: the data cannot be had, or are damaged.
    """
    if matchup not in MATCHUPS:
        raise unknown_name("matchup", matchup, MATCHUPS)
    races = MATCHUPS[matchup]
    opponent = opponent or races[0]
    if opponent not in races:
        raise unknown_name(f"race in {matchup}", opponent, races)
    mirror = len(races) == 1
    observed = observed or ("opponent" if mirror else "both")
    if observed not in ("both", "opponent"):
        raise ValueError(f"`observed` must be 'both' or 'opponent', found {observed!r}")
    if mirror and observed == "both":
        raise ValueError(
            f"`observed` must be 'opponent' in {matchup}: its file does not say who played whom"
        )
    paths = [
        locate(file_name(matchup, race), folder)
        for race in sorted(races, key=lambda race: race != opponent)
    ]
    sides = [read_arff(path) for path in paths]
    if len({len(side.values) for side in sides}) > 1:
        raise DataError(
            f"{paths[0]} and {paths[1]} do not fit: they have {len(sides[0].values)} and "
            f"{len(sides[1].values)} rows, one for each game."
        )
    kept = _first_of_each([side.values for side in sides])
    seen = sides if observed == "both" else sides[:1]
    frames = np.concatenate([side.values[kept] for side in seen], axis=1).astype(np.int64)
    return Games(
        events=tuple(event for side in seen for event in side.columns),
        frames=np.where((frames >= 0) & (frames <= LAST_FRAME), frames, NEVER),
        strategies=sides[0].labels[kept],
        classes=sides[0].classes,
    )


def features(frames: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """What a network sees of games [n, k]: presence, time and order, [n, 2k + k(k−1)/2].

    In this order: whether each event was seen (1 or 0); when, as a part of the five minutes (0 if
    never); for each two events 1 if the first came first, −1 if the second did, 0 if neither was
    seen or both in one frame. What was never seen comes after all that was.
    """
    present = frames != NEVER
    time = np.where(present, frames / LAST_FRAME, 0.0)
    never_last = np.where(present, frames, LAST_FRAME + 1)
    first, second = np.array(list(combinations(range(frames.shape[1]), 2))).T
    order = np.sign(never_last[:, second] - never_last[:, first])
    return np.concatenate([present, time, order], axis=1, dtype=np.float32)


def _first_of_each(sides: list[npt.NDArray[np.float64]]) -> list[int]:
    """The games in which no side's row was there before."""
    before: list[set[tuple[float, ...]]] = [set() for _ in sides]
    kept = []
    for game, rows in enumerate(zip(*(side.tolist() for side in sides), strict=True)):
        keys = [tuple(row) for row in rows]
        if not any(key in known for key, known in zip(keys, before, strict=True)):
            kept.append(game)
        for key, known in zip(keys, before, strict=True):
            known.add(key)
    return kept
