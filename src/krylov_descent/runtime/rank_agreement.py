"""Checks that all ranks have the same model, loss, options and starting point."""

import hashlib
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from krylov_descent.runtime.checksums import checksums
from krylov_descent.runtime.process_group import FIRST
from krylov_descent.runtime.ranks import Ranks

SHOWN = 5  # the most differences that an error message names
MOST_NUMBERS = 15  # the most numbers that the other ranks take from rank 0
READY, FAILED, WITHOUT_DATA = range(3)
NOTHING = [0] * (2 + MOST_NUMBERS)
START_ALIKE = (
    "start from the same seed or checkpoint on every rank, or broadcast parameters and buffers of "
    f"rank {FIRST}"
)


def check_alike(
    ranks: Ranks,
    settings: dict[str, str],
    tensors: dict[str, Tensor],
    numbers: Sequence[float],
    advice: Mapping[str, str],
) -> tuple[int, list[float]]:
    """Raise on all ranks if any rank differs from rank 0 in settings or tensors.

    Args:
        ranks: to compare.
        settings: text by name; must be equal on all ranks.
        tensors: by name; must be equal on all ranks, bit for bit.
        numbers: at most fifteen, as many on all ranks, which go on with those of rank 0.
        advice: what to do about a difference, by the beginning of the name of what differs.

    Returns:
        A random number that identifies the step, and rank 0's numbers; both are equal on all ranks.

    Raises:
        ValueError: on all ranks, if a rank differs from rank 0.
        RankError: another rank failed earlier. The failed rank raises its own error.

    Cost: one pass over the tensors, and nineteen numbers from each rank.
    """
    own, sums = NOTHING, dict[str, int]()
    with ranks.own_work():
        sums = dict(zip(tensors, checksums(list(tensors.values())), strict=True))
        room = [0.0] * (MOST_NUMBERS - len(numbers))
        own = [_digest(settings), _digest(sums), *map(_bits, (*numbers, *room))]
    rows = _gather(ranks, FAILED if ranks.failed else READY, own)
    if any(state != READY for state, *_ in rows):
        with ranks.phase("check"):
            ranks.end_together()
    first = rows[FIRST]
    if any(row[2] != first[2] for row in rows):
        shown = _differences(ranks.gather_objects(settings))[:SHOWN]
        told = _advice(shown, advice, "")
        raise ValueError(
            "all ranks must have the same model, dtype and options, but "
            f"{'; '.join(shown)}{told and f': {told}'}"
        )
    if any(row[3] != first[3] for row in rows):
        everyone = ranks.gather_objects(sums)
        odd = [
            f"{name} of rank {rank}"
            for rank, found in enumerate(everyone)
            for name, checksum in found.items()
            if checksum != everyone[FIRST][name]
        ][:SHOWN]
        raise ValueError(
            f"all ranks must hold the same numbers, but {' and '.join(odd)} "
            f"{'is' if len(odd) == 1 else 'are'} not as on rank {FIRST}: "
            f"{_advice(odd, advice, START_ALIKE)}"
        )
    _, number, _, _, *bits = first
    return number, [_number(one) for one in bits[: len(numbers)]]


def check_nobody_has_data(ranks: Ranks) -> None:
    """Raise on all ranks if this rank has no data for a step and another rank has some.

    Raises:
        TypeError: on the ranks without data. The other ranks raise RankError.
    """
    rows = _gather(ranks, WITHOUT_DATA, NOTHING)
    if any(state != WITHOUT_DATA for state, *_ in rows):
        problem = (
            "`data` is None on this rank, and another rank has some: give a rank without samples "
            "an empty share, (inputs[:0], targets[:0]) or []"
        )
        ranks.fail(TypeError(problem))
        ranks.end_together()


def _gather(ranks: Ranks, state: int, own: list[int]) -> list[list[int]]:
    """One row per rank: its state, a random number that identifies the step, and its integers."""
    with ranks.phase("check"):
        return ranks.gather_integers([state, secrets.randbits(62), *own])


def _differences(everyone: list[dict[str, str]]) -> list[str]:
    expected = everyone[FIRST]
    return [
        f"{name} is {found.get(name, 'not there')} on rank {rank} and "
        f"{expected.get(name, 'not there')} on rank {FIRST}"
        for rank, found in enumerate(everyone)
        for name in dict.fromkeys([*expected, *found])
        if expected.get(name) != found.get(name)
    ]


def _advice(differences: Iterable[str], advice: Mapping[str, str], usual: str) -> str:
    """What to do about differences, which begin with the name of what differs."""
    found = [
        next((told for start, told in advice.items() if one.startswith(start)), usual)
        for one in differences
    ]
    return "; ".join(filter(None, dict.fromkeys(found)))


def _digest(told: dict[str, Any]) -> int:
    text = repr(sorted(told.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
