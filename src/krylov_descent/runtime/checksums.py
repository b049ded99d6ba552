"""Checksums of tensors, by which ranks find out whether they hold the same numbers."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18  # entries that are multiplied at a time
MULTIPLIER = 0x2545F4914F6CDD1D  # odd, so that no chunk is ever multiplied away
WORDS = {1: torch.int8, 2: torch.int16}  # by bytes of an entry; wider ones are read as int32


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """One number for each tensor, of the bits of its entries and of their order.

    A sum of words times fixed random odd numbers, modulo 2⁶⁴: any change of one entry changes it,
    and so does exchanging two, but for about one pair in 2³². Sparse tensors count as zeros.

    Cost: one pass over the tensors, and one wait for a GPU. Memory: 8 · 2¹⁸ bytes.
    """
    if not tensors:
        return []
    device = tensors[0].device
    found: list[int] = torch.stack([_checksum(tensor).to(device) for tensor in tensors]).tolist()
    return found


def _checksum(tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    flat = tensor.detach().reshape(-1).contiguous()
    # No wider than 32 bits: of 64, an odd factor would leave two changed signs unseen.
    words = flat.view(WORDS.get(flat.element_size(), torch.int32))
    factors = _factors(tensor.device)
    total: Tensor
    total, *others = ((chunk * factors[: len(chunk)]).sum() for chunk in words.split(CHUNK))
    for one in others:
        total = total * MULTIPLIER + one
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Odd numbers of 64 bits [CHUNK], the same in every process."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (CHUNK,), generator=generator)
    return (drawn | 1).to(device)
