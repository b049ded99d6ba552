"""Sets B and C that grow, `subset_size="auto"`.

A step is the best point of its subspace on C, so it is worth less on all the data. How much less
is known without any further work: the next step finds the loss on A. Small sets are cheap, and
early in training what they say of a step holds for all the data; when less than half of it does,
they are doubled. (Byrd, Chin, Nocedal and Wu 2012 grow sets by the variance of gradients.)

The memory of that is five numbers in a parameter group, where checkpoints have them. Losses on
other data than those of the step before say nothing of it, and are not compared. Data are known
again by their numbers and not by their tensors, so that a resumed run knows them, too, on any
number of ranks. What is not in memory may be other data each time, and larger than memory, so there
the sets do not grow.
"""

import hashlib
import math
import weakref
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch, InMemory, Samples, tensors_in
from krylov_descent.objective.parameters import FlatParameters
from krylov_descent.objective.subsets import LEAST_FIXED, LEAST_GROWING
from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult
from krylov_descent.runtime.private import base_of, writes_of
from krylov_descent.runtime.ranks import Ranks, Shard

# Of what the last steps promised on C, so much must be seen on A.
WORTH = 0.5
# By which older steps count less.
MEMORY = 0.7
# Where only one of the sets grows, they are never seen to be everything.
MOST_DOUBLINGS = 40
# Parameters times samples: so many samples take a product on a CPU as long as what does not depend
# on them (`product_by_samples` in results/trials/small_sets.json). On a GPU it is many more.
CPU_WORK = 25_000_000
# By so many samples, or up to twice as many, data are known again.
FINGERPRINT_SAMPLES = 16
FINGERPRINT_BYTES = 6  # a whole number that float64 holds

DOUBLINGS, EXPECTED, PROMISED = "set_doublings", "set_expected", "set_promised"
SAME_DATA = "set_same_data"  # whether the last step had the data of the one before
FINGERPRINT = "set_fingerprint"  # of the data of the last step; NaN where there is none
ENTRIES = (DOUBLINGS, EXPECTED, PROMISED, SAME_DATA, FINGERPRINT)


def least_samples(parameters: FlatParameters) -> int:
    """With how many samples sets begin, if not with N/K: fewer for a large model on a CPU."""
    if parameters.device.type != "cpu":
        return LEAST_FIXED
    return min(LEAST_FIXED, max(LEAST_GROWING, CPU_WORK // parameters.numel))


def begin(group: dict[str, Any]) -> None:
    """Make the entries of a parameter group that has none."""
    group.setdefault(DOUBLINGS, 0)
    group.setdefault(EXPECTED, math.nan)
    group.setdefault(PROMISED, 0.0)
    group.setdefault(SAME_DATA, True)
    group.setdefault(FINGERPRINT, math.nan)


def same_data(group: dict[str, Any], fingerprint: float) -> bool:
    """Whether data with this fingerprint are those of the step before.

    Where that is not known, at the first step and after a state that is older than fingerprints,
    it is as at the step before.
    """
    if math.isnan(group[FINGERPRINT]):
        return bool(group[SAME_DATA]) and not math.isnan(fingerprint)
    return bool(fingerprint == group[FINGERPRINT])


def learn(group: dict[str, Any], result: StepResult) -> None:
    """What a step says of the steps before it, and of its own worth.

    Args:
        group: with the entries, which are updated.
        result: of the step.
    """
    if not group[SAME_DATA]:
        group[EXPECTED], group[PROMISED] = math.nan, 0.0
        return
    # EXPECTED is what the loss on A would be without the last steps, the older ones discounted.
    seen = group[EXPECTED] - result.loss
    fruitless = result.status is Status.NO_DECREASE and result.reason != SCALED_AWAY
    too_small = fruitless or seen < WORTH * group[PROMISED]
    everything = result.curvature_samples == result.objective_samples == result.samples
    if too_small and not everything:
        group[DOUBLINGS] = min(group[DOUBLINGS] + 1, MOST_DOUBLINGS)
        group[EXPECTED], group[PROMISED] = math.nan, 0.0
    elif result.status is Status.MOVED:
        group[EXPECTED] = result.loss + (0.0 if math.isnan(seen) else MEMORY * seen)
        group[PROMISED] = MEMORY * group[PROMISED] + result.loss_before - result.loss_after


class LastData:
    """The fingerprint of the data that the last step had, without holding on to them."""

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._shard: Shard | None = None
        self._own = 0  # what this rank's samples add to the fingerprint

    def __getstate__(self) -> dict[str, Any]:
        return vars(LastData())  # a copy will see other tensors

    def fingerprint(self, samples: Samples, ranks: Ranks) -> float:
        """Of the data of all ranks, however they are divided; the same number on every rank.

        NaN, which equals nothing, where those of a rank are not in memory. Of this rank's samples
        it is not taken again, for which a GPU is waited for, if their tensors are the same
        objects, or the same views of them, and have not been written to.

        Args:
            samples: this rank's.
            ranks: two numbers from each are gathered.
        """
        with ranks.phase("data"):
            held = samples.batch if isinstance(samples, InMemory) else None
            shard = ranks.shard_if_known(None if held is None else held.size)
            if shard is None or held is None:
                return math.nan
            with ranks.own_work():
                self._look(held, shard)
            total = sum(own for (own,) in ranks.gather_integers([self._own]))
        return float(total % 256**FINGERPRINT_BYTES)

    def _look(self, batch: Batch, shard: Shard) -> None:
        tensors = tensors_in((batch.inputs, batch.targets))
        known = len(self._marks) == len(tensors) and all(map(_Mark.fits, self._marks, tensors))
        if not known or shard != self._shard:
            self._own = _fingerprint(batch, shard)
            self._marks, self._shard = [_Mark(tensor) for tensor in tensors], shard


def _fingerprint(batch: Batch, shard: Shard) -> int:
    """A sum over a few samples from all over the ranks' data, of which this rank adds its own.

    Each adds a hash of its bits and of its place among all, so that the sum over ranks does not
    depend on where the shards begin and end.
    """
    every = max(1, shard.total // FINGERPRINT_SAMPLES)
    indices = shard.own(torch.arange(0, shard.total, every))
    few = batch.select(indices)
    tensors = [tensor.detach().cpu() for tensor in tensors_in((few.inputs, few.targets))]
    rows = [tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) for tensor in tensors]
    total = 0
    for row, index in enumerate(indices.tolist()):
        found = hashlib.sha256(f"{shard.start + index} of {shard.total}".encode())
        for tensor, numbers in zip(tensors, rows, strict=True):
            found.update(f"{tensor.dtype} {tuple(tensor.shape[1:])}".encode())
            found.update(numbers[row].view(torch.uint8).numpy().tobytes())
        total += int.from_bytes(found.digest()[:FINGERPRINT_BYTES])
    return total


class _Mark:
    """By what a tensor is known again."""

    def __init__(self, tensor: Tensor) -> None:
        self._owner = weakref.ref(base_of(tensor))
        self._part = _part(tensor)

    def fits(self, tensor: Tensor) -> bool:
        return self._owner() is base_of(tensor) and self._part == _part(tensor)


def _part(tensor: Tensor) -> tuple[Any, ...]:
    # Writes to an inference tensor are not counted: it is never known to be as it was.
    version = object() if tensor.is_inference() else writes_of(tensor)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), version
