"""Whether all ranks were asked for the same: model, options, and the parameters to start from."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from krylov_descent.distributed import FIRST, Ranks

SHOWN = 5  # differences that a message names


def check_alike(ranks: Ranks, description: dict[str, str], parameters: Sequence[Tensor]) -> None:
    """Refuse ranks that differ in what was asked for or in the parameters they start from.

    Args:
        ranks: to compare.
        description: settings by name, the same on all ranks.
        parameters: the same on all ranks, bit for bit.

    Cost: one pass over the parameters, and three numbers from each rank.
    """
    with ranks.phase("check"):
        rows = ranks.gather_integers([_digest(description), _bits(parameters), int(ranks.failed)])
        if any(failed for _, _, failed in rows):
            ranks.end_together()
        if any(settings != rows[FIRST][0] for settings, _, _ in rows):
            raise ValueError(
                "all ranks must have the same model, dtype and options, but "
                f"{'; '.join(_differences(ranks.gather_objects(description))[:SHOWN])}"
            )
        odd = [str(rank) for rank, row in enumerate(rows) if row[1] != rows[FIRST][1]]
        if odd:
            raise ValueError(
                f"the parameters of rank {' and '.join(odd)} are not those of rank {FIRST}: start "
                "from the same seed or checkpoint on every rank, or broadcast the parameters of "
                f"rank {FIRST}"
            )


def _differences(everyone: list[dict[str, str]]) -> list[str]:
    expected = everyone[FIRST]
    return [
        f"{name} is {found.get(name, 'not there')} on rank {rank} and "
        f"{expected.get(name, 'not there')} on rank {FIRST}"
        for rank, found in enumerate(everyone)
        for name in dict.fromkeys([*expected, *found])
        if expected.get(name) != found.get(name)
    ]


def _digest(description: dict[str, str]) -> int:
    text = repr(sorted(description.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], signed=True)


def _bits(parameters: Sequence[Tensor]) -> int:
    """A checksum of the parameters' bits; also of their order, up to a point."""
    sums = []
    for p in parameters:
        flat = p.detach().reshape(-1)
        numbers = flat.view(torch.int64 if flat.element_size() == 8 else torch.int32)
        sums += [numbers.sum(dtype=torch.int64), numbers[::7].sum(dtype=torch.int64)]
    total: int = sum((i + 1) * one for i, one in enumerate(torch.stack(sums).tolist()))
    return total % 2**63
