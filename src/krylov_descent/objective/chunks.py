"""The chunk of the data on which Hessian-Free takes the curvature (Martens 2010).

The data are cut into chunks in a fixed random order, and each step takes the next one, round and
round. A place in that order, and the seed that made it, are all there is to remember.
"""

import math
from typing import Any, Literal

import torch

from krylov_descent.objective.batches import Batch, InMemory, Nothing, Samples, join
from krylov_descent.runtime.ranks import Shard
from krylov_descent.runtime.threads import one_thread

ChunkSize = int | float | Literal["auto"]
# The part of CURVES that Martens takes (5,000 of 20,000), and what is too few to be any use.
AUTOMATIC_PART, SMALLEST_AUTOMATIC = 4, 1000


def check_chunk_size(size: Any) -> None:
    """Refuse what is not a size of a chunk."""
    is_count = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    is_fraction = isinstance(size, float) and 0 < size <= 1
    if not (size == "auto" or is_count or is_fraction):
        raise ValueError(
            "`chunk_size` must be 'auto', a number of samples (int ≥ 1) or a fraction of them "
            f"(float in (0, 1]), found {size!r}"
        )


def chunk_length(size: ChunkSize, total: int) -> int:
    """How many of `total` samples a chunk has: "auto" is a quarter, but at least 1,000."""
    if size == "auto":
        return max(math.ceil(total / AUTOMATIC_PART), min(total, SMALLEST_AUTOMATIC))
    if isinstance(size, float):
        return max(1, round(size * total))
    if size > total:
        raise ValueError(
            f"`chunk_size` asks for {size} samples but the data has {total}: lower it or give "
            "more data"
        )
    return size


def cycled_chunk(
    samples: Samples,
    total: int,
    length: int,
    position: int,
    seed: int,
    shard: Shard | None = None,
) -> Samples:
    """`length` samples from a place in the data's fixed random order, wrapped around its end.

    Args:
        samples: all the data, or this rank's. A stream is walked over once; its own order stands
            for the random one.
        total: how many they are on all ranks together.
        length: of the chunk.
        position: of its first sample, 0 ≤ position < total.
        seed: of the order.
        shard: where the samples lie among those of all ranks; they are all of them if left out.
    """
    if length == total:
        return samples
    shard = shard or Shard(0, total, total)
    if not samples.indexed:
        return _window(samples, shard, length, position)
    with one_thread():
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
        own = shard.own(order.roll(-position)[:length])
    return samples.select(own) if len(own) else Nothing()


def _window(stream: Samples, shard: Shard, length: int, position: int) -> Samples:
    """The samples position … position + length - 1 of all, wrapped, in the stream's order."""
    total = shard.total
    spans = ((0, position + length - total), (position, position + length))
    pieces: list[Batch] = []
    seen = shard.start
    for batch in stream.batches():
        for start, stop in spans:
            first, last = max(start - seen, 0), min(stop - seen, batch.size)
            if first < last:
                # Copied: a stream may fill the same tensors again.
                pieces.append(batch.rows(first, last).map(torch.clone))
        seen += batch.size
    if not pieces:
        return Nothing()
    joined = (join([piece.inputs for piece in pieces]), join([piece.targets for piece in pieces]))
    return InMemory(Batch.of(joined))
