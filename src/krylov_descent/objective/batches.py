"""What `data` may be, and how it becomes batches.

A batch is a pair (inputs, targets). Either side may be a tensor, None, or nested
tuples, lists and dicts of them; dimension 0 of every tensor is the batch. `as_samples`
turns what a user has (tensors, a Dataset, a DataLoader, any iterable of batches)
into one of a few kinds of `Samples`, all of which can be walked over in micro-batches;
those of known length also give out samples by index.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

# A tensor, None, or nested tuples, lists and dicts of them.
Tree = Any


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The same nest with `function` applied to every tensor in it."""
    if isinstance(tree, Tensor):
        return function(tree)
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(function, value) for value in tree)
    raise TypeError(
        f"inputs and targets must be tensors (or tuples, lists, dicts of tensors, or None), "
        f"found {type(tree).__name__}: convert it with torch.as_tensor"
    )


def tensors_in(tree: Tree) -> list[Tensor]:
    """Every tensor of a nest, in a fixed order."""
    if isinstance(tree, Tensor):  # as it is most often, and asked for again and again
        return [tree]
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return found


def floating_tensors_in(tree: Tree) -> list[Tensor]:
    """Those of them that can have a derivative."""
    return [tensor for tensor in tensors_in(tree) if tensor.is_floating_point()]


def replace_tensors(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    """The same nest with its tensors replaced, in the order of `tensors_in`."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), tree)


def join(trees: list[Tree]) -> Tree:
    """Nests of the same form, concatenated along dimension 0."""
    first = trees[0]
    if isinstance(first, Tensor):
        return torch.cat(trees)
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {key: join([tree[key] for tree in trees]) for key in first}
    parts = [join(list(column)) for column in zip(*trees, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


@dataclass(frozen=True, slots=True)
class Batch:
    """`size` samples: nests of tensors whose dimension 0 is the sample."""

    inputs: Tree
    targets: Tree
    size: int

    @classmethod
    def of(cls, pair: Any) -> "Batch":
        """Check a pair (inputs, targets) and count its samples."""
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                "a batch must be a pair (inputs, targets), found "
                f"{_describe(pair)}: give None as targets where there are none"
            )
        inputs, targets = pair
        tensors = tensors_in(inputs) + tensors_in(targets)
        if not tensors:
            raise ValueError("the batch holds no tensor: inputs and targets are both empty")
        if any(tensor.is_meta for tensor in tensors):
            raise ValueError(
                "inputs or targets are on the meta device, which holds no numbers: give tensors "
                "with numbers, made outside of torch.device('meta')"
            )
        if any(tensor.dim() == 0 for tensor in tensors):
            raise ValueError(
                "inputs and targets need a batch dimension: dimension 0 of every tensor counts "
                "the samples, found a tensor without dimensions"
            )
        sizes = sorted({tensor.shape[0] for tensor in tensors})
        if len(sizes) > 1:
            raise ValueError(
                "inputs and targets disagree on the number of samples (dimension 0): found "
                f"{' and '.join(map(str, sizes))}"
            )
        return cls(inputs, targets, sizes[0])

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """The batch with `function` applied to every tensor; the size must not change."""
        return Batch(
            map_tensors(function, self.inputs), map_tensors(function, self.targets), self.size
        )

    def rows(self, start: int, stop: int) -> "Batch":
        """The samples start … stop - 1, as views."""
        stop = min(stop, self.size)
        piece = self.map(lambda tensor: tensor[start:stop])
        return Batch(piece.inputs, piece.targets, stop - start)

    def spread(self, count: int) -> "Batch":
        """So many samples from all over, copied: the first ones may be padding, or all alike."""
        count = min(self.size, count)
        return self.select(torch.linspace(0, self.size - 1, count, dtype=torch.float64).long())

    def select(self, indices: Tensor) -> "Batch":
        """The samples of these indices, in their order, copied."""
        sent = {indices.device: indices}

        def rows_of(tensor: Tensor) -> Tensor:
            device = tensor.device
            if device not in sent:  # once; and a GPU that is busy is not waited for
                sent[device] = indices.to(device, non_blocking=tensor.is_cuda)
            return tensor.index_select(0, sent[device])

        piece = self.map(rows_of)
        return Batch(piece.inputs, piece.targets, len(indices))

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; no copy where it is there already."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, size: int | None) -> Iterator["Batch"]:
        """Pieces of at most `size` samples; the batch itself where it is small enough."""
        if size is None or self.size <= size:
            yield self
            return
        for start in range(0, self.size, size):
            yield self.rows(start, start + size)


class Samples(ABC):
    """A set of samples that can be walked over in batches."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Every sample once, in batches as large as the source gives them."""

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} has no length")

    @property
    def indexed(self) -> bool:
        """Whether the length is known and samples can be fetched by index."""
        return False

    def select(self, indices: Tensor) -> "InMemory":
        """The samples of these indices, fetched once and held."""
        raise TypeError(f"{type(self).__name__} cannot be indexed")


class InMemory(Samples):
    """One batch of tensors that holds all the samples."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def batches(self) -> Iterator[Batch]:
        yield self.batch

    def __len__(self) -> int:
        return self.batch.size

    @property
    def indexed(self) -> bool:
        return True

    def select(self, indices: Tensor) -> "InMemory":
        return InMemory(self.batch.select(indices))

    def to(self, device: torch.device) -> "InMemory":
        """The samples on a device; no copy where they are there already."""
        return InMemory(self.batch.to(device))


class Indexed(Samples):
    """A map-style dataset: samples by index, collated; batches from a loader over it."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        loader: Iterable[Any],
    ) -> None:
        self._dataset, self._collate, self._loader = dataset, collate, loader

    def batches(self) -> Iterator[Batch]:
        return (Batch.of(pair) for pair in self._loader)

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    @property
    def indexed(self) -> bool:
        return True

    def select(self, indices: Tensor) -> InMemory:
        samples = [self._dataset[int(index)] for index in indices]
        return InMemory(Batch.of(self._collate(samples)))


class Stream(Samples):
    """An iterable of batches, of unknown length, perhaps to be walked over only once."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def batches(self) -> Iterator[Batch]:
        return (Batch.of(pair) for pair in self._iterable)


# How many samples of a bare Dataset are collated at a time on the way through it.
DATASET_BATCH = 1000


class Nothing(Samples):
    """No samples: the share of a rank that has none."""

    def batches(self) -> Iterator[Batch]:
        return iter(())

    def __len__(self) -> int:
        return 0

    @property
    def indexed(self) -> bool:
        return True


class Unusable(Samples):
    """What cannot be walked over, because of a problem that is raised when that is tried."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def batches(self) -> Iterator[Batch]:
        raise self._problem

    def __len__(self) -> int:
        return 0

    @property
    def indexed(self) -> bool:
        return True


def as_samples(data: Any, argument: str = "data", *, may_be_empty: bool = False) -> Samples:
    """What the user gave, as `Samples`.

    Args:
        data: a tuple (inputs, targets), a Dataset, a DataLoader, or an iterable of batches
            (a list of pairs, a generator, …). A list of two with a tensor among them is a pair,
            too, as loaders give it.
        argument: its name, for the error message.
        may_be_empty: whether there may be no samples, as on a rank whose shard is empty.

    A DataLoader is indexed only where it deals out the whole of a map-style dataset: with a
    sampler of its own (a validation split, weighted classes) the dataset behind it may hold
    samples that must not be drawn, so it is a stream.
    """
    if isinstance(data, Samples):
        return data
    if isinstance(data, tuple) or _is_pair(data):
        batch = Batch.of(data)
        if batch.size == 0 and not may_be_empty:
            raise ValueError(f"`{argument}` is empty: it must hold at least one sample")
        return InMemory(batch)
    if isinstance(data, DataLoader):
        return _from_loader(data, argument, may_be_empty)
    if isinstance(data, IterableDataset):
        return Stream(DataLoader(data, batch_size=DATASET_BATCH))
    if isinstance(data, Dataset):
        if not hasattr(data, "__len__"):
            raise TypeError(
                f"`{argument}` is a Dataset without a length: give it a __len__, or make it an "
                "IterableDataset"
            )
        return _from_loader(DataLoader(data, batch_size=DATASET_BATCH), argument, may_be_empty)
    if isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping | str):
        return Stream(data)
    raise TypeError(
        f"`{argument}` must be a tuple (inputs, targets), a Dataset, a DataLoader or an iterable "
        f"of batches, found {_describe(data)}"
    )


def _is_pair(data: Any) -> bool:
    """Whether a list is one batch: a tensor, or no targets, can be no batch by itself."""
    if not isinstance(data, list) or len(data) != 2:
        return False
    return any(part is None or isinstance(part, Tensor) for part in data)


def _from_loader(loader: DataLoader[Any], argument: str, may_be_empty: bool) -> Samples:
    dataset, collate = loader.dataset, loader.collate_fn
    whole = (
        not isinstance(dataset, IterableDataset)
        and type(loader.batch_sampler) in (BatchSampler, type(None))
        and (
            type(loader.sampler) is SequentialSampler
            or (
                type(loader.sampler) is RandomSampler
                and not loader.sampler.replacement
                and loader.sampler.num_samples == len(dataset)  # type: ignore[arg-type]
            )
        )
        and loader.batch_size is not None
        and not loader.drop_last
    )
    if not whole:
        return Stream(loader)
    if len(dataset) == 0:  # type: ignore[arg-type]
        if may_be_empty:
            return Nothing()
        raise ValueError(f"`{argument}` is empty: it must hold at least one sample")
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2 and collate is default_collate:
        # The same samples without collating them one by one; a sum knows no order.
        return InMemory(Batch.of(dataset.tensors))
    return Indexed(dataset, collate, loader)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
