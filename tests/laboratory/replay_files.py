"""Replay files with made-up games, which the registry of data files takes for the real ones."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from krylov_descent.laboratory.download import sha256_of
from krylov_descent.laboratory.replays import file_name
from krylov_descent.laboratory.sources import SOURCES, Source

STRATEGIES = ("Rush", "Drop", "Expand")
Side = Sequence[tuple[Sequence[int], str]]


def write_side(
    monkeypatch: pytest.MonkeyPatch, folder: Path, matchup: str, race: str, rows: Side
) -> Path:
    """The file of one race: the frames of its events, and the strategy, of each game."""
    name = file_name(matchup, race)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"@relation Starcraft_{matchup}_{race}"]
    lines += [f"@attribute {race}{i} numeric" for i in range(len(rows[0][0]))]
    lines += [f"@attribute midBuild {{{','.join(STRATEGIES)}}}", "@data"]
    lines += [",".join(map(str, (*frames, strategy))) for frames, strategy in rows]
    path.write_text("\n".join(lines) + "\n")
    known = Source(name, path.stat().st_size, sha256_of(path))
    monkeypatch.setitem(SOURCES, name, known)
    return path


def write_matchup(monkeypatch: pytest.MonkeyPatch, folder: Path, games: int) -> None:
    """Terran against Zerg; which of Terran's first two events comes first is the strategy."""
    generator = np.random.default_rng(0)
    terran, zerg = [], []
    for frames in generator.integers(0, 14_000, (games, 7)).tolist():
        strategy = STRATEGIES[0] if frames[0] < frames[1] else STRATEGIES[1]
        terran.append((frames[:4], strategy))
        zerg.append((frames[4:], STRATEGIES[2]))
    write_side(monkeypatch, folder, "TvZ", "Terran", terran)
    write_side(monkeypatch, folder, "TvZ", "Zerg", zerg)
