"""The sets B (curvature) and C (objective in the subspace) of a step (paper, Section 4).

Both sets are drawn anew at each step, from a generator seeded for that step. They stay in memory
during the step, so that random augmentation cannot make the objective noisy. Data with a length
are sampled by index. A stream is sampled in one pass: each sample gets a random key, and the
samples with the smallest keys are kept.
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
# Fewer samples than LEAST_FIXED say too little about curvature. A set that grows may begin with
# LEAST_GROWING samples.
LEAST_FIXED, LEAST_GROWING = 1000, 250
# The length of a stream is unknown until its end, so more samples are kept than B and C need so
# far: those with keys below STREAM_SLACK times their fraction, and STREAM_MARGIN samples more. The
# probability that the number of keys below 1.25 times the fraction ever falls short of the number
# needed by more than s is exp(-0.46 s).
STREAM_SLACK, STREAM_MARGIN = 1.25, 50


@dataclass(frozen=True, slots=True)
class SubsetSizes:
    """The requested sizes of B and C: a number of samples (int), a fraction (float), or a word.

    For N samples the word "paper" means N/K samples, "fixed" means max(N/K, 1,000), and "auto"
    means max(N/K, `least`) · 2^`doublings`.

    Attributes:
        curvature: size of B.
        objective: size of C.
        dimension: K.
        least: the fewest samples with which an "auto" set begins.
        doublings: how many times "auto" sets have been doubled so far.
        growth: a factor on every size.
    """

    curvature: Size
    objective: Size
    dimension: int
    least: int = LEAST_FIXED
    doublings: int = 0
    growth: int = 1

    @property
    def grow(self) -> bool:
        """Whether the size of B or C is "auto", so that it may still grow."""
        return "auto" in (self.curvature, self.objective)

    def of(self, total: int) -> tuple[int, int]:
        """|B| and |C| for `total` samples.

        Raises:
            ValueError: a size given as a number of samples is larger than `total`.
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
        # Disjoint sets of a useful size do not fit: "auto" and "fixed" sets take all samples.
        return (
            total if self.curvature in ("auto", "fixed") else sizes[0],
            total if self.objective in ("auto", "fixed") else sizes[1],
        )

    def wanted_of_stream(self, seen: int) -> int:
        """|B| + |C| if the stream ended after `seen` samples; at most `seen`."""
        both = self._resolve(self.curvature, seen) + self._resolve(self.objective, seen)
        return min(seen, both)

    @property
    def fraction(self) -> float:
        """The limit of (|B| + |C|) / N as the length N of a stream grows."""
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
        """Sizes from one size for both sets, or from a pair (B, C).

        Raises:
            ValueError: a size is none of the words, no count ≥ 1 and no fraction in (0, 1].
        """
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
    """Draw B and C from indexed samples; disjoint if both fit, else with the smallest overlap.

    Indices are drawn from the samples of all ranks, and each rank selects those it holds.

    Args:
        samples: this rank's samples.
        sizes: the sizes of B and C over all ranks.
        generator: must be in the same state on every rank.
        shard: position of this rank's samples among the samples of all ranks; by default this rank
            holds all samples.

    Returns:
        This rank's parts of B and C.

    Raises:
        ValueError: a size is larger than the data.
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
    """A stream that keeps a random subset of its samples for B and C.

    Iterate over `batches` once, then call `draw`.

    Args:
        stream: this rank's stream.
        sizes: the sizes of B and C over all ranks.
        generator: draws the keys; it must be seeded differently on each rank.
        ranks: the ranks that draw together; by default this process alone.
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
        """Yield the stream's batches. Samples of a batch are kept after the caller has used it.

        Kept samples are copied unless the data are in memory: a stream may reuse its tensors.
        """
        for batch in self._stream.batches():
            yield batch
            if batch.size:
                keys = torch.rand(batch.size, dtype=torch.float64, generator=self._generator)
                self._seen += batch.size
                self._kept.append((keys, batch))
                self._prune()
                whole = self._kept[-1][1] is batch  # otherwise pruning has copied the kept rows
                if whole and not isinstance(self._stream, InMemory):
                    self._kept[-1] = keys, batch.map(torch.clone)

    def draw(self) -> tuple[Samples, Samples]:
        """This rank's parts of B and C, disjoint if both fit. Ranks exchange all kept keys."""
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
        """Drop samples whose keys are too large to be among the smallest at the end of the stream.

        At the end the m(N) smallest keys are needed, where m grows at most in proportion to N. So a
        key is kept if it is among the m(seen) smallest or below the fraction m(N)/N. If m grows, a
        margin and a slack factor allow for chance.
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
