"""The three sets of a KSD step: A for the gradient, B for the curvature, C for the search."""

from dataclasses import replace
from typing import Any

import torch

from krylov_descent.objective.batches import InMemory, Nothing, Samples
from krylov_descent.objective.subsets import LEAST_FIXED, Reservoir, SubsetSizes, draw
from krylov_descent.objective.term_samples import TermSamples
from krylov_descent.optimizers.ksd import escalation, subset_growth
from krylov_descent.optimizers.ksd.ksd_state import KSDState
from krylov_descent.runtime.ranks import Ranks, Shard


class StepSets:
    """The set A of a step, and B and C, which the user gave or which are drawn from A.

    Args:
        optimizer: that makes the step.
        data: the set A.
        curvature_data: the set B; None to draw it.
        objective_data: the set C; None to draw it.

    Attributes:
        drawn: whether both B and C are drawn.
        in_memory: whether A and B would be the same if the step were repeated.
        indexed: whether A can be iterated over again, on all ranks; known after `to_walk_over`.
    """

    def __init__(
        self, optimizer: KSDState, data: Any, curvature_data: Any, objective_data: Any
    ) -> None:
        self._optimizer, self._data = optimizer, data
        self._given = (curvature_data, objective_data)
        self._samples: Samples = Nothing()
        self._shard: Shard | None = None
        self.drawn = curvature_data is None and objective_data is None
        self.in_memory = self.indexed = False

    @property
    def _ranks(self) -> Ranks:
        return self._optimizer.objective.ranks

    def compare_data(self) -> None:
        """Note whether the step draws B and C from the same data as the previous step."""
        optimizer, group = self._optimizer, self._optimizer.param_groups[0]
        subset_growth.begin(group)  # a state of a run with fixed sets lacks the entries
        samples = optimizer._samples(self._data)
        told = samples.told_once if isinstance(samples, TermSamples) else samples
        fingerprint = optimizer._last_data.fingerprint(told, self._ranks)
        same = subset_growth.same_data(group, fingerprint)
        if isinstance(samples, TermSamples) and not same:
            # Other points or weights of the same terms: sets keep their sizes.
            subset_growth.forget(group)
            same = True
        group[subset_growth.SAME_DATA] = self.drawn and same
        group[subset_growth.FINGERPRINT] = fingerprint

    def to_walk_over(self) -> Samples:
        """The set A. Iterating over a stream also samples B and C from it."""
        optimizer, ranks = self._optimizer, self._ranks
        samples = optimizer._samples(self._data)
        self.in_memory = isinstance(samples, InMemory) and self._given[0] is None
        self._shard = ranks.shard_if_known(len(samples) if samples.indexed else None)
        self.indexed = self._shard is not None
        if None in self._given and not self.indexed:
            # Each rank draws its own random keys for the samples of its stream.
            generator = optimizer._generator(ranks.rank)
            samples = Reservoir(samples, self._sizes(), generator, ranks)
        self._samples = samples
        return samples

    def draw(self) -> tuple[Samples, Samples]:
        """The sets B and C. Those of a stream are known only after the stream has ended."""
        optimizer = self._optimizer
        curvature, objective = self._draw() if None in self._given else (Nothing(), Nothing())
        if self._given[0] is not None:
            curvature = optimizer._samples(self._given[0], "curvature_data")
        if self._given[1] is not None:
            objective = optimizer._samples(self._given[1], "objective_data", repeatable=True)
        return curvature, objective

    def _draw(self) -> tuple[Samples, Samples]:
        """Draw B and C from A, and move them to the device of the parameters."""
        optimizer, samples = self._optimizer, self._samples
        sets: tuple[Samples, Samples] = (Nothing(), Nothing())
        if isinstance(samples, Reservoir):
            sets = samples.draw()
        with self._ranks.own_work():
            if isinstance(samples, TermSamples):
                sets = samples.draw(self._sizes(), optimizer._generator())
            elif self._shard is not None:
                sets = draw(samples, self._sizes(), optimizer._generator(), self._shard)
            device = optimizer.objective.parameters.device
            sets = (_on(sets[0], device), _on(sets[1], device))
        return sets

    def _sizes(self) -> SubsetSizes:
        """The sizes of B and C for this step."""
        wanted, group = self._optimizer.subset_sizes, self._optimizer.param_groups[0]
        sizes = replace(wanted, growth=escalation.set_growth(group))
        if not (wanted.grow and group[subset_growth.SAME_DATA]):
            return replace(sizes, least=LEAST_FIXED)
        return replace(sizes, doublings=int(group[subset_growth.DOUBLINGS]))


def _on(samples: Samples, device: torch.device) -> Samples:
    return samples.to(device) if isinstance(samples, InMemory) else samples
