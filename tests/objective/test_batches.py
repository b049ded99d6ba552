"""What `data` may be, and how it becomes batches."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from krylov_descent.objective.batches import (
    DATASET_BATCH,
    Batch,
    Indexed,
    InMemory,
    Samples,
    Stream,
    as_samples,
    join,
    map_tensors,
    replace_tensors,
    tensors_in,
)

Pair = namedtuple("Pair", ["left", "right"])

LEAVES = st.just(None) | st.integers(1, 3).map(lambda width: torch.randn(4, width))
TREES = st.recursive(
    LEAVES,
    lambda children: (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), children, max_size=3)
        | st.builds(Pair, children, children)
    ),
    max_leaves=6,
)


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is (i, 10 i), and remembers which were asked for."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, list[int]()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.size:
            raise IndexError(index)
        self.asked.append(index)
        return torch.tensor([float(index)]), torch.tensor([10.0 * index])


class Flowing(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.tensor([float(i)]), torch.tensor([10.0 * i])) for i in range(self.size))


def _numbers(samples: Samples) -> list[float]:
    """The inputs of all batches, after a check that each target belongs to its input."""
    batches = list(samples.batches())
    for batch in batches:
        assert batch.inputs.shape[0] == batch.size
        assert torch.equal(batch.targets, batch.inputs * 10)
    return [float(x) for batch in batches for x in batch.inputs]


# Nests of tensors ---------------------------------------------------------------------------------


@given(TREES)
def test_tensors_of_a_nest_can_be_taken_out_and_put_back(tree: Any) -> None:
    tensors = tensors_in(tree)
    same = replace_tensors(tree, tensors)
    assert type(same) is type(tree)
    assert all(a is b for a, b in zip(tensors, tensors_in(same), strict=True))
    doubled = map_tensors(lambda t: t * 2, tree)
    assert all(torch.equal(a * 2, b) for a, b in zip(tensors, tensors_in(doubled), strict=True))


@given(TREES)
def test_join_undoes_a_split(tree: Any) -> None:
    parts = [map_tensors(lambda t, i=i: t[i : i + 2], tree) for i in (0, 2)]  # type: ignore[misc]
    whole = tensors_in(join(parts))
    assert all(torch.equal(a, b) for a, b in zip(whole, tensors_in(tree), strict=True))


def test_the_form_of_a_nest_is_kept() -> None:
    tree = (torch.zeros(2), {"a": [torch.ones(2), None]}, Pair(torch.zeros(2), ()))
    moved = map_tensors(lambda t: t + 1, tree)
    assert isinstance(moved[2], Pair)
    assert moved[1]["a"][1] is None
    assert torch.equal(moved[1]["a"][0], torch.full((2,), 2.0))


@pytest.mark.parametrize("leaf", ["text", 3.0, {1, 2}])
def test_what_is_no_tensor_is_refused(leaf: object) -> None:
    with pytest.raises(TypeError, match=r"inputs and targets must be tensors.*torch\.as_tensor"):
        Batch.of((torch.zeros(2), [leaf]))


# Batches ------------------------------------------------------------------------------------------


def test_a_batch_counts_its_samples_through_nests() -> None:
    batch = Batch.of(({"a": torch.zeros(4, 2)}, (torch.zeros(4), None)))
    assert batch.size == 4
    assert Batch.of((torch.zeros(3), None)).size == 3
    assert Batch.of([None, torch.zeros(3)]).size == 3


def test_rows_are_views_and_selected_samples_are_copies() -> None:
    x = torch.arange(5.0)
    batch = Batch.of((x, {"t": x * 10}))
    rows = batch.rows(1, 3)
    assert rows.size == 2
    assert rows.inputs.data_ptr() == x[1:].data_ptr()
    assert torch.equal(rows.targets["t"], torch.tensor([10.0, 20.0]))
    assert batch.rows(3, 9).size == 2

    chosen = batch.select(torch.tensor([4, 0]))
    assert chosen.size == 2
    x[4] = -1
    assert torch.equal(chosen.inputs, torch.tensor([4.0, 0.0]))


@given(st.integers(1, 12), st.none() | st.integers(1, 13))
def test_split_gives_every_sample_once(size: int, most: int | None) -> None:
    pieces = list(Batch.of((torch.arange(size), None)).split(most))
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), torch.arange(size))
    assert all(piece.size == len(piece.inputs) for piece in pieces)
    assert max(piece.size for piece in pieces) == (size if most is None else min(size, most))


@pytest.mark.parametrize(
    ("pair", "error", "message"),
    [
        (torch.zeros(2, 2), TypeError, r"pair \(inputs, targets\), found a tensor of shape \(2, 2"),
        ((torch.zeros(2),), TypeError, r"pair \(inputs, targets\), found a tuple of 1.*None"),
        ([torch.zeros(2)] * 3, TypeError, r"pair \(inputs, targets\), found a list of 3"),
        ({"x": torch.zeros(2)}, TypeError, r"pair \(inputs, targets\), found a dict"),
        ((None, ()), ValueError, "no tensor: inputs and targets are both empty"),
        ((torch.tensor(1.0), torch.zeros(1)), ValueError, "inputs and targets need a batch dim"),
        ((torch.zeros(3), torch.zeros(2)), ValueError, "inputs and targets disagree.*2 and 3"),
        (({"a": torch.zeros(3), "b": torch.zeros(4)}, None), ValueError, "disagree.*3 and 4"),
    ],
)
def test_a_wrong_pair_is_refused(pair: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Batch.of(pair)


# Forms of data ------------------------------------------------------------------------------------


def test_a_tuple_is_held_in_memory() -> None:
    x = torch.arange(4.0)
    samples = as_samples((x, x * 10))
    assert isinstance(samples, InMemory)
    assert samples.indexed
    assert len(samples) == 4
    (batch,) = samples.batches()
    assert batch.inputs is x
    assert _numbers(samples.select(torch.tensor([3, 1]))) == [3.0, 1.0]
    assert as_samples(samples) is samples


def test_a_dataset_is_indexed_and_walked_in_order() -> None:
    dataset = Numbered(DATASET_BATCH + 3)
    samples = as_samples(dataset)
    assert isinstance(samples, Indexed)
    assert samples.indexed
    assert len(samples) == DATASET_BATCH + 3
    assert [batch.size for batch in samples.batches()] == [DATASET_BATCH, 3]
    assert _numbers(samples) == list(range(DATASET_BATCH + 3))
    dataset.asked.clear()
    assert _numbers(samples.select(torch.tensor([7, 2]))) == [7.0, 2.0]
    assert dataset.asked == [7, 2]  # and no other


def test_a_tensor_dataset_is_not_collated_sample_by_sample() -> None:
    x = torch.arange(4.0).unsqueeze(1)
    for data in (
        TensorDataset(x, x * 10),
        DataLoader(TensorDataset(x, x * 10), batch_size=3, shuffle=True),
    ):
        samples = as_samples(data)
        assert isinstance(samples, InMemory)
        assert samples.batch.inputs is x


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_over_its_whole_dataset_is_indexed(shuffle: bool) -> None:
    samples = as_samples(DataLoader(Numbered(7), batch_size=3, shuffle=shuffle))
    assert isinstance(samples, Indexed)
    assert len(samples) == 7
    assert [batch.size for batch in samples.batches()] == [3, 3, 1]
    assert sorted(_numbers(samples)) == list(range(7))
    assert _numbers(samples.select(torch.tensor([5]))) == [5.0]


def test_the_loaders_collate_function_serves_walks_and_selections() -> None:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x = torch.stack([-x for x, _ in samples])
        return x, x * 10

    samples = as_samples(DataLoader(Numbered(4), batch_size=2, collate_fn=collate))
    assert _numbers(samples) == [0.0, -1.0, -2.0, -3.0]
    assert _numbers(samples.select(torch.tensor([3]))) == [-3.0]
    tensors = TensorDataset(torch.ones(4, 1), torch.ones(4, 1) * 10)
    changed = as_samples(DataLoader(tensors, batch_size=2, collate_fn=collate))
    assert _numbers(changed) == [-1.0] * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": SubsetRandomSampler([1, 3, 5]), "batch_size": 2},
        {"sampler": WeightedRandomSampler([1.0] * 7, 7), "batch_size": 2},
        {"sampler": RandomSampler(range(7), replacement=True), "batch_size": 2},
        {"sampler": RandomSampler(range(7), num_samples=3), "batch_size": 2},
        {"sampler": [2, 4], "batch_size": 2},
        {"batch_sampler": BatchSampler(SubsetRandomSampler([1, 3]), 2, False)},
        {"batch_size": 3, "drop_last": True},
        {"batch_size": None},
    ],
    ids=["subset", "weighted", "replacement", "part", "list", "batch-sampler", "drop-last", "bare"],
)
def test_a_loader_that_deals_out_something_else_is_a_stream(settings: dict[str, Any]) -> None:
    samples = as_samples(DataLoader(Numbered(7), **settings))
    assert isinstance(samples, Stream)
    assert not samples.indexed
    with pytest.raises(TypeError, match="no length"):
        len(samples)
    with pytest.raises(TypeError, match="cannot be indexed"):
        samples.select(torch.tensor([0]))


def test_a_stream_gives_only_what_the_sampler_deals_out() -> None:
    part = as_samples(DataLoader(Numbered(7), batch_size=2, sampler=SubsetRandomSampler([1, 3, 5])))
    assert sorted(_numbers(part)) == [1.0, 3.0, 5.0]
    dropped = as_samples(DataLoader(Numbered(7), batch_size=3, drop_last=True))
    assert _numbers(dropped) == list(range(6))


def test_an_iterable_dataset_is_a_stream() -> None:
    bare = as_samples(Flowing(5))
    assert isinstance(bare, Stream)
    assert _numbers(bare) == list(range(5))
    loaded = as_samples(DataLoader(Flowing(5), batch_size=2))
    assert isinstance(loaded, Stream)
    assert [batch.size for batch in loaded.batches()] == [2, 2, 1]


def test_an_iterable_of_batches_is_a_stream() -> None:
    batches = [(torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])), _pair(3.0)]
    assert _numbers(as_samples(batches)) == [1.0, 2.0, 3.0]
    generator = as_samples(_pair(float(i)) for i in range(3))
    assert isinstance(generator, Stream)
    assert _numbers(generator) == [0.0, 1.0, 2.0]


def _pair(number: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([[number]]), torch.tensor([[10 * number]])


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [torch.zeros(2), {"x": torch.zeros(2)}, "data", 3, None])
def test_other_data_is_refused_by_its_argument(data: object) -> None:
    with pytest.raises(TypeError, match=r"`curvature_data` must be a tuple \(inputs, targets\)"):
        as_samples(data, "curvature_data")


@pytest.mark.parametrize(
    "data",
    [
        (torch.zeros(0, 2), torch.zeros(0)),
        TensorDataset(torch.zeros(0, 2), torch.zeros(0)),
        Numbered(0),
        DataLoader(Numbered(0), batch_size=2),
    ],
    ids=["tuple", "tensors", "dataset", "loader"],
)
def test_empty_data_is_refused_by_its_argument(data: object) -> None:
    with pytest.raises(ValueError, match="`objective_data` is empty"):
        as_samples(data, "objective_data")


def test_a_list_of_two_is_a_pair_where_it_can_be_nothing_else() -> None:
    x, y = torch.zeros(3, 2), torch.zeros(3)
    (batch,) = DataLoader(TensorDataset(x, y), batch_size=3)
    assert isinstance(batch, list)
    for pair in (batch, [x, None], [(x, x), y]):
        assert [b.size for b in as_samples(pair).batches()] == [3]
    assert [b.size for b in as_samples([(x, y), (x, y)]).batches()] == [3, 3]
    with pytest.raises(TypeError, match=r"pair \(inputs, targets\), found a tensor"):
        list(as_samples([x, y, y]).batches())


def test_a_dataset_without_a_length_is_refused_by_its_argument() -> None:
    class Endless(Dataset[tuple[Tensor, Tensor]]):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.zeros(2), torch.zeros(1)

    with pytest.raises(TypeError, match=r"`data` is a Dataset without a length.*IterableDataset"):
        as_samples(Endless())


def test_a_tensor_dataset_of_three_is_refused() -> None:
    data = TensorDataset(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    with pytest.raises(TypeError, match=r"pair \(inputs, targets\), found a list of 3"):
        list(as_samples(data).batches())
