"""The sets B and C: how large they are, and how they are drawn."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from krylov_descent.objective.batches import InMemory, Samples, Stream, as_samples
from krylov_descent.objective.subsets import STREAM_MARGIN, Reservoir, Size, SubsetSizes, draw

K = 20


def _sizes(wanted: "Size | tuple[Size, Size]", dimension: int = K) -> SubsetSizes:
    return SubsetSizes.checked(wanted, dimension)


def _numbered(total: int) -> tuple[Tensor, Tensor]:
    x = torch.arange(total)
    return x, x * 10


def _stream(total: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, t = _numbered(total)
    return ((x[i : i + batch], t[i : i + batch]) for i in range(0, total, batch))


def _refilled(total: int, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same samples, each batch in the memory of the one before."""
    inputs, targets = torch.zeros(2, batch, dtype=torch.int64)
    for x, t in _stream(total, batch):
        yield inputs[: len(x)].copy_(x), targets[: len(x)].copy_(t)


def _numbers(samples: Samples) -> list[int]:
    """Which samples these are, after a check that each has its own target."""
    batches = list(samples.batches())
    assert all(torch.equal(b.targets, b.inputs * 10) for b in batches)
    return [int(x) for b in batches for x in b.inputs]


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _reservoir(
    total: int, batch: int, sizes: SubsetSizes, seed: int = 0, stream: Any = _stream
) -> Reservoir:
    """A reservoir that a stream has flowed through."""
    reservoir = Reservoir(Stream(stream(total, batch)), sizes, _generator(seed))
    # A sees every sample.
    assert [int(x) for b in reservoir.batches() for x in b.inputs] == list(range(total))
    return reservoir


# Sizes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "total", "expected"),
    [
        # auto: as fixed, to begin with.
        ("auto", 1999, (1999, 1999)),
        ("auto", 2000, (1000, 1000)),
        # fixed: max(⌈N/K⌉, min(N, 1,000)), all of A where two such sets do not fit.
        ("fixed", 1, (1, 1)),
        ("fixed", 500, (500, 500)),
        ("fixed", 1000, (1000, 1000)),
        ("fixed", 1999, (1999, 1999)),
        ("fixed", 2000, (1000, 1000)),
        ("fixed", 20_000, (1000, 1000)),
        ("fixed", 20_001, (1001, 1001)),
        ("fixed", 60_000, (3000, 3000)),
        # The paper's N/K.
        ("paper", 1, (1, 1)),
        ("paper", 20, (1, 1)),
        ("paper", 21, (2, 2)),
        ("paper", 60_000, (3000, 3000)),
        # By number, by fraction, by pairs.
        (7, 20, (7, 7)),
        (20, 20, (20, 20)),
        (0.25, 20, (5, 5)),
        (1.0, 20, (20, 20)),
        (0.001, 20, (1, 1)),
        ((3, 0.5), 20, (3, 10)),
        (("paper", 4), 40, (2, 4)),
        (("fixed", 4), 40, (40, 4)),
        ((4, "fixed"), 40, (4, 40)),
    ],
)
def test_sizes(wanted: Any, total: int, expected: tuple[int, int]) -> None:
    assert _sizes(wanted).of(total) == expected


@pytest.mark.parametrize(
    "wanted",
    [0, -1, True, 0.0, 1.5, -0.5, math.nan, "all", None, [3, 3], (3,), (3, 3, 3), (3, "half")],
)
def test_other_sizes_are_refused(wanted: Any) -> None:
    with pytest.raises(ValueError, match=r"`subset_size` must be 'auto', 'fixed', 'paper'.*found"):
        _sizes(wanted)


@pytest.mark.parametrize("wanted", [21, (21, 1), (1, 21)])
def test_more_than_there_is_is_refused(wanted: Any) -> None:
    with pytest.raises(ValueError, match=r"`subset_size` asks for 21 samples but the data has 20"):
        draw(as_samples(_numbered(20)), _sizes(wanted), _generator())
    reservoir = _reservoir(20, 7, _sizes(wanted))
    with pytest.raises(ValueError, match=r"`subset_size` asks for 21 samples but the data has 20"):
        reservoir.draw()


# By index and from a stream: the same promises ----------------------------------------------------


def _drawn(total: int, sizes: SubsetSizes, seed: int, batch: int | None) -> tuple[Any, Any]:
    """B and C by index where `batch` is None, else from a stream of such batches."""
    if batch is None:
        return draw(as_samples(_numbered(total)), sizes, _generator(seed))
    return _reservoir(total, batch, sizes, seed).draw()


@settings(max_examples=100)
@given(
    total=st.integers(1, 120),
    wanted=st.sampled_from(
        [0.05, 0.3, 0.5, 0.7, 1.0, "paper", "fixed", "auto", (0.1, 0.6), ("paper", 1)]
    ),
    dimension=st.integers(1, 30),
    batch=st.none() | st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_sets_have_their_sizes_no_duplicates_and_are_disjoint(
    total: int, wanted: Any, dimension: int, batch: int | None, seed: int
) -> None:
    sizes = _sizes(wanted, dimension)
    b, c = (_numbers(samples) for samples in _drawn(total, sizes, seed, batch))
    assert (len(b), len(c)) == sizes.of(total)
    assert len(set(b)) == len(b)
    assert len(set(c)) == len(c)
    assert {*b, *c} <= set(range(total))
    # Disjoint where both fit, and no more in common than must be where they do not.
    assert len({*b} & {*c}) == max(0, len(b) + len(c) - total)


@pytest.mark.parametrize("total", [21, 141, 401])
def test_short_streams_give_full_sets(total: int) -> None:
    # Just above a multiple of K both sets want one more, and chance has not evened out yet.
    sizes = _sizes("paper")
    for seed in range(40):
        b, c = (_numbers(samples) for samples in _drawn(total, sizes, seed, 20))
        assert (len(b), len(c)) == sizes.of(total)
        assert len({*b, *c}) == len(b) + len(c)


def test_a_growing_fraction_is_always_there() -> None:
    # Whenever the stream ends, the smallest keys of all that flowed by are held.
    sizes = _sizes("paper", dimension=40)
    reservoir = Reservoir(Stream(_stream(8_000, 37)), sizes, _generator())
    keys = torch.rand(8_000, dtype=torch.float64, generator=_generator())  # the same ones
    seen = 0
    for batch in reservoir.batches():
        held = torch.cat([k for k, _ in reservoir._kept]) if seen else keys[:0]
        wanted = sum(sizes.of(seen)) if seen else 0
        assert torch.equal(held.sort().values[:wanted], keys[:seen].sort().values[:wanted])
        seen += batch.size


@pytest.mark.parametrize("batch", [None, 3, 50])
def test_the_same_generator_draws_the_same_sets(batch: int | None) -> None:
    first, again, other = (
        [_numbers(samples) for samples in _drawn(50, _sizes(7), seed, batch)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("wanted", [3, 0.1, "paper", "fixed"])
@pytest.mark.parametrize("batch", [7, 50, 400])
def test_a_stream_may_fill_the_same_tensors_again(wanted: Any, batch: int) -> None:
    fresh, refilled = (
        [_numbers(samples) for samples in _reservoir(400, batch, _sizes(wanted), 0, stream).draw()]
        for stream in (_stream, _refilled)
    )
    assert refilled == fresh


@pytest.mark.parametrize("batch", [None, 16])
def test_all_samples_are_given_without_a_copy(batch: int | None) -> None:
    b, c = _drawn(16, _sizes("fixed"), 0, batch)
    assert b is c
    assert sorted(_numbers(b)) == list(range(16))


def test_all_samples_of_tensors_are_the_tensors() -> None:
    samples = as_samples(_numbered(16))
    b, c = draw(samples, _sizes("fixed"), _generator())
    assert b is samples
    assert c is samples


# Chance -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [None, 20, 70])
@pytest.mark.parametrize("wanted", [9, 0.05, "paper"])
def test_every_sample_is_drawn_equally_often(wanted: Any, batch: int | None) -> None:
    total, trials = 150, 200
    sizes = _sizes(wanted, dimension=10)
    counts = torch.zeros(2, total)
    for seed in range(trials):
        for row, samples in zip(counts, _drawn(total, sizes, seed, batch), strict=True):
            row[_numbers(samples)] += 1
    for row, size in zip(counts, sizes.of(total), strict=True):
        expected = trials * size / total
        # Draws without replacement scatter less than multinomially, by (N - m)/(N - 1).
        statistic = float(((row - expected) ** 2).sum()) / expected
        statistic *= (total - 1) / (total - size)
        # χ² with 149 degrees of freedom is above 207 once in 1,000 times.
        assert statistic < 207


def test_b_and_c_are_drawn_independently_of_the_order_of_the_stream() -> None:
    # C must not be, say, the later part of the stream.
    later = 0
    for seed in range(200):
        b, c = _drawn(40, _sizes(5), seed, 8)
        later += sum(_numbers(c)) > sum(_numbers(b))
    assert 72 < later < 128  # 4 standard deviations


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "total"), [(10, 10_000), (0.01, 10_000), ("paper", 10_000), ("fixed", 40_000)]
)
def test_a_stream_is_not_held_as_a_whole(wanted: Any, total: int) -> None:
    batch = 200
    sizes = _sizes(wanted)
    reservoir = Reservoir(Stream(_stream(total, batch)), sizes, _generator())
    most = 0
    for _ in reservoir.batches():
        most = max(most, sum(len(keys) for keys, _ in reservoir._kept))
    wanted_together = sum(sizes.of(total))
    assert most <= 2 * (wanted_together + STREAM_MARGIN) + batch
    b, c = reservoir.draw()
    assert len(b) + len(c) == wanted_together
    assert not reservoir._kept


def test_what_is_kept_does_not_hold_the_batches_it_came_from() -> None:
    sizes = _sizes(2)
    reservoir = Reservoir(Stream(_stream(5000, 1000)), sizes, _generator())
    list(reservoir.batches())
    held = sum(batch.inputs.untyped_storage().nbytes() for _, batch in reservoir._kept)
    assert held <= 8 * 2 * sum(sizes.of(5000))


def test_what_is_in_memory_is_kept_without_a_copy() -> None:
    """As on a rank whose samples are, where those of another are a stream."""
    samples = as_samples(_numbered(16))
    reservoir = Reservoir(samples, _sizes("fixed"), _generator())
    (batch,) = reservoir.batches()
    assert reservoir._kept[0][1] is batch


def test_only_the_samples_drawn_are_fetched() -> None:
    class Counting(TensorDataset):
        fetched = 0

        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            Counting.fetched += 1
            return tuple(tensor[index] for tensor in self.tensors)

    b, c = draw(as_samples(Counting(*_numbered(1000))), _sizes(4), _generator())
    assert Counting.fetched == 8
    assert isinstance(b, InMemory)
    assert len({*_numbers(b), *_numbers(c)}) == 8
    _numbers(b)
    assert Counting.fetched == 8  # held, so that augmentation cannot change them


def test_nested_batches_flow_through() -> None:
    def batches() -> Iterator[Any]:
        for x, t in _stream(20, 6):
            yield {"a": (x, x + 1), "b": None}, [t]

    reservoir = Reservoir(Stream(batches()), _sizes(3), _generator())
    list(reservoir.batches())
    for samples in reservoir.draw():
        (batch,) = samples.batches()
        x, following = batch.inputs["a"]
        assert batch.inputs["b"] is None
        assert torch.equal(following, x + 1)
        assert torch.equal(batch.targets[0], x * 10)
        assert batch.size == len(x) == 3
