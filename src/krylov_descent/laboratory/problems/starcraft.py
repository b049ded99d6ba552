"""StarCraft: the opponent's strategy from what was seen in the first five minutes of a game.

The paper has 1,000 games, 900 to train on and 100 to test, 5,077 inputs and 8 strategies, and does
not say whose they are. Here they are the replays of Weber & Mateas 2009. No match-up of theirs has
these very numbers; Terran against Zerg, seen from both sides, has nearly as many inputs (5,049).
After the duplicates are gone each has fewer than 1,000 games, so a tenth is tested on.
"""

from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from krylov_descent.laboratory.models import classifier
from krylov_descent.laboratory.problems.problem import (
    CLASSIFICATION_ERROR,
    PaperSettings,
    Problem,
    PublishedResult,
    Size,
    Split,
    softmax_cross_entropy,
)
from krylov_descent.laboratory.replays import MATCHUPS, Games, Observed, features, read_games

NAME = "starcraft"
TITLE = "StarCraft"
SUMMARY = "Classification of the opponent's strategy from five minutes of a game."

GAMES, SMALL_GAMES = 1_000, 300
SPLITS = 10
HIDDEN = 10
# Of 1e-4, 1e-3, 3e-3 and 1e-2 the one with the lowest validation error and loss for KSD together.
WEIGHT_DECAY = 3e-3

VINYALS_POVEY = "Vinyals & Povey 2011, Table 2"
PUBLISHED = (
    PublishedResult(method="KSD", source=VINYALS_POVEY, train=0.0, test=0.05, time=0.7),
    PublishedResult(method="HF", source=VINYALS_POVEY, train=0.0, test=0.11, time=1.0),
)


def load_starcraft(
    *,
    folder: str | Path | None = None,
    seed: int = 0,
    size: Size | None = None,
    validation: int | None = None,
    matchup: str = "TvZ",
    opponent: str | None = None,
    observed: Observed | None = None,
    split: int = 0,
) -> Problem:
    """The paper's network with 10 hidden units on the replays of Weber & Mateas.

    Args:
        folder: see `sources.data_folder`; files that are not there are downloaded.
        seed: of the shuffling of the games before they are split.
        size: "small" for 300 games and the opponent's events alone.
        validation: how many games of the training part are held out; by default as many as are
            tested on.
        matchup: PvP, PvT, PvZ, TvT, TvZ or ZvZ.
        opponent: Protoss, Terran or Zerg, whose strategy is asked for; by default the match-up's
            first.
        observed: whether "both" players' events are seen or the "opponent"'s alone; both by
            default, except in PvP, TvT and ZvZ, whose files do not say who played whom.
        split: which tenth of the shuffled games is tested on, 0 to 9.
    """
    small = size == "small"
    if small and observed is None:
        observed = "opponent"
    games = read_games(matchup, opponent, observed, folder)
    parts = split_games(len(games.frames), seed, split, validation, SMALL_GAMES if small else GAMES)
    inputs = features(games.frames)
    train, held_out, test = (_tensors(inputs, games, part) for part in parts)
    race = opponent or MATCHUPS[matchup][0]
    # So few games need no chunks: HF takes the curvature on all of them.
    paper = PaperSettings(curvature_samples=len(train[0]), published=PUBLISHED)
    return Problem(
        name=NAME,
        title=f"{TITLE}, {race} in {matchup}" + (", small" if small else ""),
        summary=SUMMARY,
        task="classification",
        train=train,
        validation=held_out if len(held_out[0]) else None,
        test=test,
        build=partial(classifier, (inputs.shape[1], HIDDEN, len(games.classes))),
        loss=softmax_cross_entropy,
        criterion=nn.CrossEntropyLoss(),
        metric=CLASSIFICATION_ERROR,
        weight_decay=WEIGHT_DECAY,
        paper=None if small else paper,
    )


def split_games(
    count: int, seed: int, split: int, validation: int | None = None, most: int = GAMES
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The games to train on, to validate with and to test on.

    The games are shuffled, the first `most` are taken and cut into ten parts. One is tested on;
    the validation games are those that follow it, around the end, so that with their default
    number they are the next part. The test sets of the ten splits of a seed do not overlap.

    Args:
        count: of the games there are.
        seed: of the shuffling.
        split: the part to test on.
        validation: how many games to validate with; as many as are tested on by default.
        most: of the games to take.
    """
    if split not in range(SPLITS):
        raise ValueError(f"`split` must be from 0 to {SPLITS - 1}, found {split!r}")
    shuffled = np.random.default_rng(seed).permutation(count)[:most]
    bounds = np.linspace(0, len(shuffled), SPLITS + 1).round().astype(int)
    start, end = bounds[split], bounds[split + 1]
    tested, others = shuffled[start:end], np.roll(shuffled, -end)[: len(shuffled) - (end - start)]
    held_out = len(tested) if validation is None else validation
    if not 0 <= held_out < len(others):
        raise ValueError(
            f"`validation` must be 0 or more and below {len(others)} games, found {held_out}"
        )
    return others[held_out:], others[:held_out], tested


def _tensors(inputs: npt.NDArray[np.float32], games: Games, part: npt.NDArray[np.int64]) -> Split:
    return torch.from_numpy(inputs[part]), torch.from_numpy(games.strategies[part])
