"""The kinds of `data` that users may give, and how they become batches.

A batch is a pair (inputs, targets). Either side may be a tensor, None, or nested tuples, lists and
dicts of tensors; dimension 0 of every tensor is the batch. `as_samples` converts tensors, a
Dataset, a DataLoader or any iterable of batches to a kind of `Samples`. All kinds can be iterated
over in batches. Kinds of known length can also select samples by index.
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

# A tensor, None, or nested tuples, lists and dicts of tensors.
Tree = Any


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Apply `function` to every tensor of a tree; returns a tree of the same structure.

    Raises:
        TypeError: the tree holds something else than tensors and None.
    """
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
    """All tensors of a tree, in a fixed order."""
    if isinstance(tree, Tensor):  # a shortcut for the most frequent case
        return [tree]
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(collect, tree)
    return found


def floating_tensors_in(tree: Tree) -> list[Tensor]:
    """All floating-point tensors of a tree, in the order of `tensors_in`."""
    return [tensor for tensor in tensors_in(tree) if tensor.is_floating_point()]


def replace_tensors(tree: Tree, tensors: Iterable[Tensor]) -> Tree:
    """A copy of a tree with its tensors replaced, in the order of `tensors_in`."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), tree)


def join(trees: list[Tree]) -> Tree:
    """Concatenate trees of the same structure along dimension 0 of their tensors."""
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
    """`size` samples: trees of tensors whose dimension 0 is the sample."""

    inputs: Tree
    targets: Tree
    size: int

    @classmethod
    def of(cls, pair: Any) -> "Batch":
        """A batch from a pair (inputs, targets).

        Raises:
            TypeError: `pair` is not a pair, or holds something else than tensors.
            ValueError: there is no tensor, a tensor is on the meta device or has no dimension, or
                the tensors differ in dimension 0.
        """
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
        return type(self)(
            map_tensors(function, self.inputs), map_tensors(function, self.targets), self.size
        )

    def parts(self) -> Iterator[tuple[str, "Batch"]]:
        """The samples of each term of the objective, with its name; "" for the only one."""
        yield "", self

    def rows(self, start: int, stop: int) -> "Batch":
        """The samples start … stop - 1, as views."""
        stop = min(stop, self.size)
        piece = self.map(lambda tensor: tensor[start:stop])
        return Batch(piece.inputs, piece.targets, stop - start)

    def every(self, count: int, first: int) -> "Batch":
        """A copy of every count-th sample, from the sample `first` on."""
        # Copied, because a forward pass may take a view that joins samples and time steps.
        piece = self.map(lambda tensor: tensor[first::count].contiguous())
        return Batch(piece.inputs, piece.targets, len(range(first, self.size, count)))

    def spread(self, count: int) -> "Batch":
        """A copy of `count` samples at equal distances: the first ones may be padding or alike."""
        count = min(self.size, count)
        return self.select(torch.linspace(0, self.size - 1, count, dtype=torch.float64).long())

    def select(self, indices: Tensor) -> "Batch":
        """A copy of the samples at these indices [m], in the order of the indices."""
        sent = {indices.device: indices}

        def rows_of(tensor: Tensor) -> Tensor:
            device = tensor.device
            if device not in sent:  # one transfer per device, without waiting for a busy GPU
                sent[device] = indices.to(device, non_blocking=tensor.is_cuda)
            return tensor.index_select(0, sent[device])

        piece = self.map(rows_of)
        return Batch(piece.inputs, piece.targets, len(indices))

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; no copy of tensors that are already there."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, size: int | None) -> Iterator["Batch"]:
        """Yield pieces of at most `size` samples; the batch itself if it is small enough."""
        if size is None or self.size <= size:
            yield self
            return
        for start in range(0, self.size, size):
            yield self.rows(start, start + size)


class Samples(ABC):
    """A set of samples that can be iterated over in batches."""

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Yield every sample once, in batches of the size that the source has."""

    def __len__(self) -> int:
        raise TypeError(f"{type(self).__name__} has no length")

    @property
    def indexed(self) -> bool:
        """Whether the length is known and samples can be selected by index."""
        return False

    def select(self, indices: Tensor) -> "InMemory":
        """The samples at these indices [m], in memory. Raises TypeError if not `indexed`."""
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
        """The samples on a device; no copy of tensors that are already there."""
        return InMemory(self.batch.to(device))


class Indexed(Samples):
    """A map-style dataset. `select` collates samples; `batches` iterates over a loader."""

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
    """An iterable of batches of unknown length. It may be possible to iterate only once."""

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._iterable = iterable

    def batches(self) -> Iterator[Batch]:
        return (Batch.of(pair) for pair in self._iterable)


# The batch size for iterating over a Dataset that comes without a loader.
DATASET_BATCH = 1000


class Nothing(Samples):
    """No samples: the shard of a rank that has none."""

    def batches(self) -> Iterator[Batch]:
        return iter(())

    def __len__(self) -> int:
        return 0

    @property
    def indexed(self) -> bool:
        return True


class Unusable(Samples):
    """Data that cannot be used. Iterating over it raises the problem."""

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
    """Convert the user's data to `Samples`.

    A DataLoader becomes indexed samples only if it yields the whole of a map-style dataset. With a
    sampler of its own (a validation split, weighted classes) it becomes a stream, because the
    dataset behind it may hold samples that must not be drawn.

    Args:
        data: a tuple (inputs, targets), a Dataset, a DataLoader, or an iterable of batches
            (a list of pairs, a generator, …). A list of two items, of which one is a tensor or
            None, is a pair, too, because loaders yield pairs as lists.
        argument: the name of the argument, for error messages.
        may_be_empty: whether there may be no samples, as on a rank whose shard is empty.

    Raises:
        TypeError: `data` is of another kind, or a Dataset without a length.
        ValueError: `data` is empty, or is a pair that is not a batch.
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
    """Whether a list is one batch. In a list of batches no item is a tensor or None."""
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
        # Avoids collating samples one by one. Their order does not matter for a sum.
        return InMemory(Batch.of(dataset.tensors))
    return Indexed(dataset, collate, loader)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
