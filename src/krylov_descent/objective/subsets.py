"""The sets B (curvature) and C (objective in the subspace) of a step (paper, Section 4).

Both are drawn anew each step, from a generator that belongs to the step, and held in memory
while it lasts, so that random augmentation cannot make the objective noisy. From data with a
length they are drawn by index. From a stream they are drawn on the way through it: each sample
gets a random key and those with the smallest keys are kept.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch, InMemory, Nothing, Samples, join
from krylov_descent.runtime.ranks import Ranks, Shard
from krylov_descent.runtime.threads import one_thread

Size = int | float | Literal["auto", "fixed", "paper"]
# Below this a tenth of the samples is too few to say anything about curvature; sets that grow may
# begin with less.
LEAST_FIXED, LEAST_GROWING = 1000, 250
# A stream is over before its length is known, so more is held back than is wanted so far: a
# larger fraction of what flows by, and some samples more. How many keys lie below 1.25 times the
# fraction falls behind the number wanted by more than s with probability exp(-0.46 s), ever.
STREAM_SLACK, STREAM_MARGIN = 1.25, 50


@dataclass(frozen=True, slots=True)
class SubsetSizes:
    """How large B and C are wanted: samples (int), a fraction (float), or a word.

    Attributes:
        curvature: of B.
        objective: of C.
        dimension: K, of which "paper" (N/K), "fixed" (the same, but at least 1,000) and "auto" (at
            least `least`, times 2 to the number of doublings) speak.
        least: the fewest samples that a growing set begins with.
        doublings: so far.
        growth: how many times as many samples as asked for.
    """

    curvature: Size
    objective: Size
    dimension: int
    least: int = LEAST_FIXED
    doublings: int = 0
    growth: int = 1

    @property
    def grow(self) -> bool:
        """Whether there is a set whose size is not settled."""
        return "auto" in (self.curvature, self.objective)

    def of(self, total: int) -> tuple[int, int]:
        """|B| and |C| for `total` samples.

        Raises:
            ValueError: a size asked for by number is larger than the data.
        """
        for wanted in (self.curvature, self.objective):
            if isinstance(wanted, int) and wanted > total:
                raise ValueError(
                    f"`subset_size` asks for {wanted} samples but the data has {total}: "
                    "lower it or give more data"
                )
        sizes = self._resolve(self.curvature, total), self._resolve(self.objective, total)
        if sum(sizes) <= total:
            return sizes
        # Too few for disjoint sets of a useful size: the automatic ones take all samples.
        return (
            total if self.curvature in ("auto", "fixed") else sizes[0],
            total if self.objective in ("auto", "fixed") else sizes[1],
        )

    def wanted_of_stream(self, seen: int) -> int:
        """How many samples B and C need together if the stream ended now."""
        both = self._resolve(self.curvature, seen) + self._resolve(self.objective, seen)
        return min(seen, both)

    @property
    def fraction(self) -> float:
        """The part of an ever longer stream that B and C take together."""
        return self.growth * sum(
            wanted if isinstance(wanted, float) else self._factor(wanted) / self.dimension
            for wanted in (self.curvature, self.objective)
            if not isinstance(wanted, int)
        )

    def _resolve(self, wanted: Size, total: int) -> int:
        if isinstance(wanted, str):
            part = math.ceil(total / self.dimension)
            least = {"auto": self.least, "fixed": LEAST_FIXED, "paper": 1}[wanted]
            size = self._factor(wanted) * max(part, least)
        elif isinstance(wanted, float):
            size = max(1, round(wanted * total))
        else:
            size = int(wanted)
        return min(total, self.growth * size)

    def _factor(self, wanted: Size) -> int:
        return 2**self.doublings if wanted == "auto" else 1

    @classmethod
    def checked(
        cls, subset_size: "Size | tuple[Size, Size]", dimension: int, least: int = LEAST_FIXED
    ) -> "SubsetSizes":
        """One size for both sets, or a pair (B, C), with each checked."""
        pair: tuple[Any, ...] = (
            subset_size if isinstance(subset_size, tuple) else (subset_size, subset_size)
        )
        if len(pair) != 2 or not all(_is_size(size) for size in pair):
            raise ValueError(
                "`subset_size` must be 'auto', 'fixed', 'paper', a number of samples (int ≥ 1), "
                "a fraction (float in (0, 1]), or a pair of these for B and C, found "
                f"{subset_size!r}"
            )
        return cls(*pair, dimension, least)


def _is_size(size: object) -> bool:
    if isinstance(size, str):
        return size in ("auto", "fixed", "paper")
    if isinstance(size, bool):
        return False
    if isinstance(size, float):
        return 0 < size <= 1
    return isinstance(size, int) and size >= 1


def draw(
    samples: Samples,
    sizes: SubsetSizes,
    generator: torch.Generator,
    shard: Shard | None = None,
) -> tuple[Samples, Samples]:
    """B and C from samples that are indexed; disjoint where both fit, else as far as possible.

    Args:
        samples: of this rank.
        sizes: of B and C on all ranks together.
        generator: in the same state on every rank.
        shard: where the samples lie among those of all ranks; they are all of them if left out.
            The indices are drawn from all, and each rank takes what it has of them.
    """
    shard = shard or Shard(0, len(samples), len(samples))
    total = shard.total
    wanted_b, wanted_c = sizes.of(total)
    with one_thread():
        order = torch.randperm(total, generator=generator)
    curvature = _select(samples, shard.own(order[:wanted_b]))
    if wanted_b == wanted_c == total:
        return curvature, curvature
    return curvature, _select(samples, shard.own(order[total - wanted_c :]))


def _select(samples: Samples, indices: Tensor) -> Samples:
    if len(indices) == 0:
        return Nothing()
    if isinstance(samples, InMemory) and len(indices) == len(samples):
        return samples  # all of them: no copy
    return samples.select(indices)


class Reservoir(Samples):
    """A stream that keeps a random part of what flows through it.

    Walk over `batches` once, then ask for `draw`.

    Args:
        stream: of this rank.
        sizes: of B and C, on all ranks together.
        generator: of the keys.
        ranks: among which the samples with the smallest keys are found; alone if left out. The
            generator must be another one on each.
    """

    def __init__(
        self,
        stream: Samples,
        sizes: SubsetSizes,
        generator: torch.Generator,
        ranks: Ranks | None = None,
    ) -> None:
        self._stream, self._sizes, self._generator = stream, sizes, generator
        self._ranks = ranks or Ranks(torch.device("cpu"))
        self._kept: list[tuple[Tensor, Batch]] = []
        self._seen = 0

    def batches(self) -> Iterator[Batch]:
        """The stream's batches; each is looked at for B and C after it was used.

        What is kept of it is copied: a stream may fill the same tensors again.
        """
        for batch in self._stream.batches():
            yield batch
            if batch.size:
                keys = torch.rand(batch.size, dtype=torch.float64, generator=self._generator)
                self._seen += batch.size
                self._kept.append((keys, batch))
                self._prune()
                whole = self._kept[-1][1] is batch  # else pruning has copied some rows of it
                if whole and not isinstance(self._stream, InMemory):
                    self._kept[-1] = keys, batch.map(torch.clone)

    def draw(self) -> tuple[Samples, Samples]:
        """B and C, disjoint where both fit."""
        ranks = self._ranks
        own = torch.cat([torch.empty(0, dtype=torch.float64), *(keys for keys, _ in self._kept)])
        everyone = ranks.gather_numbers(own)
        before = sum(len(keys) for keys in everyone[: ranks.rank])
        keys = torch.cat(everyone)
        shard = Shard(before, len(own), len(keys))
        total = ranks.shard(self._seen).total
        wanted_b, wanted_c = self._sizes.of(total)
        order = keys.argsort()[: wanted_b + wanted_c]
        sets: tuple[Samples, Samples] = (Nothing(), Nothing())
        with ranks.own_work():
            held = self._held(len(own))
            sets = held, held
            if not wanted_b == wanted_c == total:
                sets = (
                    _select(held, shard.own(order[:wanted_b])),
                    _select(held, shard.own(order[-wanted_c:])),
                )
        self._kept = []
        return sets

    def _held(self, size: int) -> Samples:
        if not self._kept:
            return Nothing()
        inputs = join([batch.inputs for _, batch in self._kept])
        targets = join([batch.targets for _, batch in self._kept])
        return InMemory(Batch(inputs, targets, size))

    def _prune(self) -> None:
        """Drop what can no longer be among the smallest keys wanted at the end.

        At the end the m(N) smallest keys are wanted, with m growing in N at most in proportion.
        So a key stays when it is among the m(seen) smallest, or below the fraction m(N)/N itself,
        with some slack for chance where m grows.
        """
        held = sum(len(keys) for keys, _ in self._kept)
        wanted = self._sizes.wanted_of_stream(self._seen)
        if self._sizes.fraction:
            wanted += STREAM_MARGIN
        if held <= 2 * wanted:
            return
        keys = torch.cat([keys for keys, _ in self._kept])
        bound = max(float(keys.kthvalue(wanted).values), STREAM_SLACK * self._sizes.fraction)
        self._kept = [
            (keys[small], batch.select(small.nonzero()[:, 0]))
            for keys, batch in self._kept
            if bool((small := keys <= bound).any())
        ]
