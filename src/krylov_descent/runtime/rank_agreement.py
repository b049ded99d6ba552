"""Whether all ranks were asked for the same: model, loss, options, and where to start from."""

import hashlib
import secrets
import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from krylov_descent.runtime.checksums import checksums
from krylov_descent.runtime.ranks import FIRST, Ranks

SHOWN = 5  # differences that a message names
MOST_NUMBERS = 8  # of rank 0's that the others take over
READY, FAILED, WITHOUT_DATA = range(3)
NOTHING = [0] * (2 + MOST_NUMBERS)


def check_alike(
    ranks: Ranks, settings: dict[str, str], tensors: dict[str, Tensor], numbers: Sequence[float]
) -> tuple[int, list[float]]:
    """Refuse ranks that differ in what was asked for or in the tensors they start from.

    Args:
        ranks: to compare.
        settings: words by name, the same on all ranks.
        tensors: by name, the same on all ranks, bit for bit.
        numbers: at most eight, as many on all ranks, of which rank 0's count.

    Returns:
        A random number to know the step by, and rank 0's numbers, both the same on all ranks.

    Raises:
        ValueError: on all ranks, where one differs from rank 0.
        RankError: where a rank failed before; that one raises what it failed of.

    Cost: one pass over the tensors, and twelve numbers from each rank.
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
        raise ValueError(
            "all ranks must have the same model, dtype and options, but "
            f"{'; '.join(_differences(ranks.gather_objects(settings))[:SHOWN])}"
        )
    if any(row[3] != first[3] for row in rows):
        everyone = ranks.gather_objects(sums)
        odd = [
            f"{name} of rank {rank}"
            for rank, found in enumerate(everyone)
            for name, checksum in found.items()
            if checksum != everyone[FIRST][name]
        ]
        raise ValueError(
            f"all ranks must hold the same numbers, but {' and '.join(odd[:SHOWN])} "
            f"{'is' if len(odd) == 1 else 'are'} not as on rank {FIRST}: start from the same seed "
            "or checkpoint on every rank, or broadcast parameters and buffers of rank "
            f"{FIRST}"
        )
    _, number, _, _, *bits = first
    return number, [_number(one) for one in bits[: len(numbers)]]


def check_nobody_has_data(ranks: Ranks) -> None:
    """End with an error on all ranks where this one has no data for a step and another has.

    Raises:
        TypeError: on the ranks without data; RankError on the others.
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
    """The rows of all ranks, behind the state of each and a number to know the step by."""
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


def _digest(told: dict[str, Any]) -> int:
    text = repr(sorted(told.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def _bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _number(bits: int) -> float:
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return number
