"""The samples of an objective of several terms, of which each rank computes a share.

All ranks hold all samples of all terms, and draw the same subsets. A rank's share is taken last, so
what is drawn does not depend on the number of ranks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch, InMemory
from krylov_descent.objective.subsets import SubsetSizes
from krylov_descent.objective.term import Term
from krylov_descent.objective.term_batches import TermBatch, shares
from krylov_descent.runtime.ranks import Ranks
from krylov_descent.runtime.threads import one_thread


class TermSamples(InMemory):
    """Samples of several terms, from which subsets are drawn term by term.

    Args:
        terms: with weights and numbers of samples.
        parts: the samples of each term, all of them on every rank.
        like: a tensor with the dtype and the device of factors.
        ranks: that divide the work.

    Attributes:
        batch: this rank's share, which may be empty.
    """

    def __init__(
        self, terms: Mapping[str, Term], parts: dict[str, Batch], like: Tensor, ranks: Ranks
    ) -> None:
        self._terms, self._parts, self._like = terms, parts, like.detach()
        self._ranks = ranks
        total = sum(part.size for part in parts.values())
        factors = {name: terms[name].weight * total / part.size for name, part in parts.items()}
        self._whole = TermBatch.of_terms(parts, factors, self._like)
        super().__init__(self._whole.share(ranks.rank, ranks.size))

    def draw(self, sizes: SubsetSizes, generator: torch.Generator) -> tuple[InMemory, InMemory]:
        """B and C: disjoint where both fit into a term, else with the smallest overlap."""
        own = {name: part.size for name, part in self._parts.items()}
        given = {name: term.subset_size for name, term in self._terms.items()}
        wanted_b, wanted_c = (shares(size, own, given) for size in sizes.of(self._whole.size))
        if wanted_b == wanted_c == own:
            return self, self
        curvature, objective = dict[str, Batch](), dict[str, Batch]()
        for name, part in self._parts.items():
            with one_thread():
                order = torch.randperm(part.size, generator=generator)
            curvature[name] = part.select(order[: wanted_b[name]])
            objective[name] = part.select(order[part.size - wanted_c[name] :])
        return (
            TermSamples(self._terms, curvature, self._like, self._ranks),
            TermSamples(self._terms, objective, self._like, self._ranks),
        )

    def select(self, indices: Tensor) -> InMemory:
        """This rank's share of the samples at these indices [m] among those of all ranks."""
        return InMemory(self._whole.select(indices).share(self._ranks.rank, self._ranks.size))

    @property
    def told_once(self) -> InMemory:
        """All samples on the first rank, and none on the others."""
        return InMemory(self._whole if self._ranks.leads else self._whole.rows(0, 0))

    def to(self, device: torch.device) -> "TermSamples":
        """These samples; they are on the device of the parameters already."""
        return self
