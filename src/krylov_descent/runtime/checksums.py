"""Checksums of tensors, which ranks compare to find out whether they hold equal tensors."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18  # entries per chunk; bounds the memory for temporary tensors
MULTIPLIER = 0x2545F4914F6CDD1D  # odd, so invertible modulo 2⁶⁴: no chunk loses its influence
WORDS = {1: torch.int8, 2: torch.int16}  # integer view by bytes per entry; wider entries use int32


def checksums(tensors: Sequence[Tensor]) -> list[int]:
    """One 64-bit checksum per tensor, which depends on the bits of the entries and on their order.

    A checksum is a sum of integer words times fixed random odd numbers, modulo 2⁶⁴. Changing one
    entry changes the checksum. Swapping two entries changes it, except for about one pair in 2³².
    The checksum of a sparse tensor is 0.

    Cost: one pass over the tensors and one GPU synchronisation. Memory: 8 · 2¹⁸ bytes.
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
    # At most 32 bits per word: with 64-bit words two flipped sign bits would cancel, because 2⁶³
    # times an odd number is 2⁶³ modulo 2⁶⁴.
    words = flat.view(WORDS.get(flat.element_size(), torch.int32))
    factors = _factors(tensor.device)
    total: Tensor
    total, *others = ((chunk * factors[: len(chunk)]).sum() for chunk in words.split(CHUNK))
    for one in others:
        total = total * MULTIPLIER + one
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Odd 64-bit integers [CHUNK], equal in every process."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (CHUNK,), generator=generator)
    return (drawn | 1).to(device)
