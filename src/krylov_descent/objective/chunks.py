"""The chunk of the data on which Hessian-Free computes curvature (Martens 2010).

The data are put into a fixed random order and divided into chunks. Each step takes the next chunk,
cyclically. The state is a position in that order and the seed of the order.
"""

import math
from typing import Any, Literal

import torch

from krylov_descent.objective.batches import Batch, InMemory, Nothing, Samples, join
from krylov_descent.runtime.ranks import Shard
from krylov_descent.runtime.threads import one_thread

ChunkSize = int | float | Literal["auto"]
# "auto" takes 1/AUTOMATIC_PART of the data, as Martens does for CURVES (5,000 of 20,000), and at
# least SMALLEST_AUTOMATIC samples, because fewer are of no use.
AUTOMATIC_PART, SMALLEST_AUTOMATIC = 4, 1000


def check_chunk_size(size: Any) -> None:
    """Raise ValueError if `size` is not "auto", a count ≥ 1 or a fraction in (0, 1]."""
    is_count = isinstance(size, int) and not isinstance(size, bool) and size >= 1
    is_fraction = isinstance(size, float) and 0 < size <= 1
    if not (size == "auto" or is_count or is_fraction):
        raise ValueError(
            "`chunk_size` must be 'auto', a number of samples (int ≥ 1) or a fraction of them "
            f"(float in (0, 1]), found {size!r}"
        )


def chunk_length(size: ChunkSize, total: int) -> int:
    """The number of samples in a chunk: "auto" is a quarter of `total`, but at least 1,000.

    Raises:
        ValueError: `size` is a count larger than `total`.
    """
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
    """`length` samples from `position` on in the data's fixed random order, wrapped at its end.

    Args:
        samples: this rank's samples. A stream is read once, and its own order replaces the random
            order.
        total: the number of samples over all ranks.
        length: the number of samples in the chunk.
        position: of the first sample of the chunk, 0 ≤ position < total.
        seed: of the random order.
        shard: position of this rank's samples among the samples of all ranks; by default this rank
            holds all samples.

    Returns:
        This rank's part of the chunk.
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
    """Samples position … position + length - 1 in the stream's order, wrapped at its end."""
    total = shard.total
    spans = ((0, position + length - total), (position, position + length))
    pieces: list[Batch] = []
    seen = shard.start
    for batch in stream.batches():
        for start, stop in spans:
            first, last = max(start - seen, 0), min(stop - seen, batch.size)
            if first < last:
                # Copied, because a stream may reuse its tensors.
                pieces.append(batch.rows(first, last).map(torch.clone))
        seen += batch.size
    if not pieces:
        return Nothing()
    joined = (join([piece.inputs for piece in pieces]), join([piece.targets for piece in pieces]))
    return InMemory(Batch.of(joined))
