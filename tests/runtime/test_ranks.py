"""The shards of several ranks, and what needs no second process to be tried."""

import copy

import pytest
import torch
from torch import Tensor

from krylov_descent.objective.batches import InMemory, Samples, as_samples
from krylov_descent.objective.chunks import cycled_chunk
from krylov_descent.objective.subsets import SubsetSizes, draw
from krylov_descent.runtime.ranks import Ranks, Shard

TOTAL = 23
SHARDS = ([23], [10, 13], [0, 20, 3], [1] * 23)


def numbered(start: int = 0, stop: int = TOTAL) -> Samples:
    numbers = torch.arange(start, stop)
    return as_samples((numbers.unsqueeze(1).float(), numbers), may_be_empty=True)


def targets(samples: Samples) -> list[int]:
    return [int(t) for batch in samples.batches() for t in batch.targets]


def on_ranks(sizes: list[int]) -> list[tuple[Samples, Shard]]:
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    return [
        (numbered(start, start + size), Shard(start, size, TOTAL))
        for start, size in zip(starts, sizes, strict=True)
    ]


@pytest.mark.parametrize("sizes", SHARDS, ids=str)
@pytest.mark.parametrize("wanted", [(5, 7), (0.3, 0.3), ("paper", "paper"), ("fixed", "auto")])
def test_ranks_together_draw_what_one_process_draws(
    sizes: list[int], wanted: tuple[int, int]
) -> None:
    subset_sizes = SubsetSizes.checked(wanted, 4)

    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(3)

    expected = draw(numbered(), subset_sizes, generator())
    drawn = [draw(own, subset_sizes, generator(), shard) for own, shard in on_ranks(sizes)]
    for which in (0, 1):
        together = [target for sets in drawn for target in targets(sets[which])]
        assert sorted(together) == sorted(targets(expected[which]))


@pytest.mark.parametrize("sizes", SHARDS, ids=str)
@pytest.mark.parametrize("streams", [False, True])
def test_ranks_together_take_the_chunk_of_one_process(sizes: list[int], streams: bool) -> None:
    def given(samples: Samples) -> Samples:
        assert isinstance(samples, InMemory)
        return as_samples([(samples.batch.inputs, samples.batch.targets)]) if streams else samples

    for position in (0, 8, 20):
        expected = cycled_chunk(given(numbered()), TOTAL, 6, position, 5)
        parts = [
            cycled_chunk(given(own), TOTAL, 6, position, 5, shard) for own, shard in on_ranks(sizes)
        ]
        assert sorted(t for part in parts for t in targets(part)) == sorted(targets(expected))


def test_a_process_by_itself_sums_nothing_and_sends_nothing() -> None:
    ranks = Ranks(torch.device("cpu"))
    numbers: Tensor = torch.tensor([1.0, torch.nan], dtype=torch.float64)
    assert ranks.leads
    assert (ranks.rank, ranks.size, ranks.together) == (0, 1, False)
    assert ranks.sum_numbers(numbers) is numbers
    assert ranks.sum_vector(numbers) is ranks.agreed(numbers) is numbers
    assert ranks.shard(7) == Shard(0, 7, 7)
    assert ranks.share("a word") == "a word"
    assert ranks.slice_of(5) == slice(0, 5)
    with pytest.raises(KeyError), ranks.own_work():
        raise KeyError("at once")
    assert ranks.traffic == {}
    assert copy.deepcopy(ranks).size == 1
