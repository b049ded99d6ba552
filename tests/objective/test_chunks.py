"""The cycled chunk: sizes, and that every sample has its turn."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from krylov_descent.objective.batches import InMemory, Samples, as_samples
from krylov_descent.objective.chunks import check_chunk_size, chunk_length, cycled_chunk

TOTAL = 10


def in_memory() -> Samples:
    return as_samples((torch.arange(TOTAL).float().unsqueeze(1), torch.arange(TOTAL)))


def stream() -> Samples:
    """The same samples in batches of 4, 4 and 2."""
    inputs, targets = torch.arange(TOTAL).float().unsqueeze(1), torch.arange(TOTAL)
    return as_samples(list(zip(inputs.split(4), targets.split(4), strict=True)))


def refilled_stream() -> Samples:
    """The same, each batch in the memory of the one before."""

    class Refilled:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            inputs, targets = torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64)
            for batch in stream().batches():
                yield (
                    inputs[: batch.size].copy_(batch.inputs),
                    targets[: batch.size].copy_(batch.targets),
                )

    return as_samples(Refilled())


def numbers(samples: Samples) -> list[int]:
    targets: list[Tensor] = [batch.targets for batch in samples.batches()]
    return [int(number) for number in torch.cat(targets)]


@pytest.mark.parametrize(
    ("size", "total", "expected"),
    [
        ("auto", 20_000, 5000),
        ("auto", 60_001, 15_001),
        ("auto", 3000, 1000),
        ("auto", 700, 700),
        (7500, 60_000, 7500),
        (0.25, 20_000, 5000),
        (1.0, 33, 33),
        (0.001, 10, 1),
    ],
)
def test_the_length_of_a_chunk(size: int | float, total: int, expected: int) -> None:
    assert chunk_length(size, total) == expected


def test_a_chunk_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_length(11, 10)


@pytest.mark.parametrize("size", [0, -3, 0.0, 1.5, True, "all", None])
def test_a_size_that_is_none_is_refused(size: object) -> None:
    with pytest.raises(ValueError, match="chunk_size"):
        check_chunk_size(size)


@pytest.mark.parametrize("samples", [in_memory(), stream(), refilled_stream()])
def test_going_round_takes_every_sample_equally_often(samples: Samples) -> None:
    # 10 chunks of 3 are three times round 10 samples.
    seen: list[int] = []
    for turn in range(TOTAL):
        chunk = cycled_chunk(samples, TOTAL, 3, turn * 3 % TOTAL, seed=4)
        assert isinstance(chunk, InMemory)
        assert len(chunk) == 3
        found = numbers(chunk)
        assert len(set(found)) == 3
        seen += found
    assert sorted(seen) == sorted([*range(TOTAL)] * 3)


def test_the_order_is_random_but_fixed_by_the_seed() -> None:
    def order(seed: int) -> list[int]:
        parts = [cycled_chunk(in_memory(), TOTAL, 5, position, seed) for position in (0, 5)]
        return numbers(parts[0]) + numbers(parts[1])

    assert order(1) == order(1)
    assert sorted(order(1)) == [*range(TOTAL)]
    assert order(1) != [*range(TOTAL)]
    assert order(1) != order(2)


def test_inputs_stay_with_their_targets() -> None:
    for samples in (in_memory(), stream(), refilled_stream()):
        chunk = cycled_chunk(samples, TOTAL, 4, 8, seed=0)
        assert isinstance(chunk, InMemory)
        assert torch.equal(chunk.batch.inputs[:, 0].long(), chunk.batch.targets)


def test_a_stream_wraps_around_its_end() -> None:
    assert numbers(cycled_chunk(stream(), TOTAL, 4, 8, seed=0)) == [0, 1, 8, 9]


def test_a_chunk_of_all_samples_is_the_data_themselves() -> None:
    samples = in_memory()
    assert cycled_chunk(samples, TOTAL, TOTAL, 0, seed=0) is samples
