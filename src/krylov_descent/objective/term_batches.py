"""Batches that hold samples of several terms.

The objective of several terms is Σ_t w_t · (mean over the N_t samples of t). It is also a plain
mean over all N samples, if those of t have the factor w_t·N/N_t. These factors belong to a set of
samples, so they are part of its batch, and pieces of the batch keep them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from krylov_descent.objective.batches import Batch


@dataclass(frozen=True, slots=True)
class TermBatch(Batch):
    """Samples of several terms: dicts of inputs, and of pairs (targets, factors [m]), by name.

    Samples are numbered term by term, in the order of the names.
    """

    @classmethod
    def of_terms(
        cls, parts: Mapping[str, Batch], factors: Mapping[str, float], like: torch.Tensor
    ) -> "TermBatch":
        """A set of samples.

        Args:
            parts: the samples of each term.
            factors: of each term's losses.
            like: a tensor with the dtype and the device that factors shall have.
        """
        return cls(
            {name: part.inputs for name, part in parts.items()},
            {
                name: (part.targets, like.new_full((part.size,), factors[name]))
                for name, part in parts.items()
            },
            sum(part.size for part in parts.values()),
        )

    @property
    def terms(self) -> dict[str, Batch]:
        """The samples of each term, with pairs (targets, factors) as their targets."""
        return {
            name: Batch(self.inputs[name], pair, len(pair[1]))
            for name, pair in self.targets.items()
        }

    def parts(self) -> Iterator[tuple[str, "TermBatch"]]:
        """The samples of each term, as a batch of one term."""
        for name, part in self.terms.items():
            yield name, self._joined({name: part})

    def _joined(self, parts: Mapping[str, Batch]) -> "TermBatch":
        """A batch of these parts; those that are empty are left out."""
        kept = {name: part for name, part in parts.items() if part.size}
        return TermBatch(
            {name: part.inputs for name, part in kept.items()},
            {name: part.targets for name, part in kept.items()},
            sum(part.size for part in kept.values()),
        )

    def rows(self, start: int, stop: int) -> "TermBatch":
        """From each term the same part of its samples, about stop - start in all, as views.

        Ranges that follow each other have every sample once. The first of them has samples of all
        terms, so it is never empty.
        """
        stop = min(stop, self.size)

        def place(index: int, part: Batch) -> int:
            return -(-index * part.size // self.size)

        return self._joined(
            {
                name: part.rows(place(start, part), place(stop, part))
                for name, part in self.terms.items()
            }
        )

    def share(self, number: int, count: int) -> "TermBatch":
        """One of `count` shares, about equal parts of each term; a share may lack small terms."""
        if count == 1:
            return self
        return self.rows(self.size * number // count, self.size * (number + 1) // count)

    def every(self, count: int, first: int) -> "TermBatch":
        """A copy of every count-th sample, from the sample `first` on."""
        parts, seen = dict[str, Batch](), 0
        for name, part in self.terms.items():
            parts[name] = part.every(count, (first - seen) % count)
            seen += part.size
        return self._joined(parts)

    def spread(self, count: int) -> "TermBatch":
        """A copy of `count` samples of each term at equal distances."""
        return self._joined({name: part.spread(count) for name, part in self.terms.items()})

    def select(self, indices: torch.Tensor) -> "TermBatch":
        """A copy of the samples at these indices [m], term by term."""
        parts, seen = dict[str, Batch](), 0
        for name, part in self.terms.items():
            own = indices[(indices >= seen) & (indices < seen + part.size)] - seen
            parts[name] = part.select(own)
            seen += part.size
        return self._joined(parts)

    def split(self, size: int | None) -> Iterator[Batch]:
        """Yield pieces of about `size` samples; the batch itself if it is small enough."""
        for piece in Batch.split(self, size):
            if piece.size:
                yield piece


def shares(size: int, sizes: Mapping[str, int], given: Mapping[str, int | None]) -> dict[str, int]:
    """How many samples of each term a subset has.

    Args:
        size: of the subset, if all terms were one.
        sizes: N_t of each term.
        given: numbers that were asked for.
    """
    total = sum(sizes.values())
    found: dict[str, int] = {}
    for name, of_term in sizes.items():
        # The boundary has few points beside the interior, and matters as much.
        share = max(-(-size * of_term // total), -(-size // len(sizes)))
        found[name] = min(of_term, given[name] or share)
    return found
