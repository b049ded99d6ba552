"""A checksum sees every bit of a tensor and where it is."""

import pytest
import torch
from torch import Tensor

from krylov_descent.runtime.checksums import CHUNK, MULTIPLIER, _factors, checksums

DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool),
    torch.complex64,
]


def numbers(dtype: torch.dtype, count: int = 40) -> Tensor:
    return (torch.arange(count) * 7 % 23).to(dtype)


def test_it_is_a_sum_of_words_times_odd_numbers_modulo_two_to_the_64() -> None:
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(0))
    words, factors = tensor.view(torch.int32).tolist(), _factors(tensor.device).tolist()
    expected = sum(word * factor for word, factor in zip(words, factors, strict=False)) % 2**64
    assert checksums([tensor])[0] % 2**64 == expected
    assert all(factor % 2 for factor in factors)
    # The second chunk: the first times an odd number, and its own words.
    long = torch.zeros(CHUNK + 300)
    long[0], long[CHUNK:] = 1.0, tensor
    first = 0x3F800000 * factors[0]
    assert checksums([long])[0] % 2**64 == (first * MULTIPLIER + expected) % 2**64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_two_entries_that_change_places_are_seen(dtype: torch.dtype) -> None:
    tensor = numbers(dtype)
    (before,) = checksums([tensor])
    for i in range(len(tensor)):
        for j in range(i):
            swapped = tensor.clone()
            swapped[i], swapped[j] = tensor[j], tensor[i]
            assert (checksums([swapped])[0] == before) == bool(tensor[i] == tensor[j])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_any_two_signs_are_seen(dtype: torch.dtype) -> None:
    tensor = numbers(dtype) + 1
    found = {checksums([tensor])[0]}
    pairs = [(i, j) for i in range(len(tensor)) for j in range(i + 1)]
    for i, j in pairs:
        turned = tensor.clone()
        turned[i], turned[j] = -tensor[i], -tensor[j]
        found.add(checksums([turned])[0])
    assert len(found) == 1 + len(pairs)


def test_places_far_apart_and_forms_in_memory() -> None:
    tensor = torch.zeros(3 * CHUNK)
    found = set()
    for place in (0, 1, CHUNK - 1, CHUNK, 2 * CHUNK, 3 * CHUNK - 1):
        tensor[place] = 1
        found.add(checksums([tensor])[0])
        tensor[place] = 0
    assert len(found) == 6
    table = torch.randn(5, 7)
    assert checksums([table.t().contiguous().t()]) == checksums([table])
    assert checksums([table.t()]) != checksums([table])
    several = [table, table[0], torch.empty(0), table[0, 0], torch.ones(1).expand(4)]
    assert checksums(several) == [checksums([one])[0] for one in several]
    assert checksums([]) == []
    assert checksums([table.to_sparse()]) == [0]
