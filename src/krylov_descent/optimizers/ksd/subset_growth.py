"""Sets B and C that grow during training: `subset_size="auto"`.

A step is the best point of its subspace on C, so its decrease on all the data is smaller. The next
step computes the loss on A anyway, which tells how much smaller. Small sets are cheap, and early in
training their decrease carries over to all the data. When less than half of it does, the sets are
doubled. (Byrd, Chin, Nocedal and Wu 2012 grow sets by the variance of gradients.) Searches of terms
are long enough to fit the points that they have, so a step of theirs looks at all points before it
is taken (see `Iteration.fitted_its_points`).

The memory is six numbers in a parameter group, which checkpoints save. Losses are compared only if
the data are those of the previous step. A fingerprint of the numbers, not the identity of the
tensors, tells whether they are. So a resumed run recognises its data too, on any number of ranks.
Data that are not in memory may change from step to step and be larger than memory, so the sets do
not grow there.
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
from krylov_descent.optimizers.ksd.work import overhead_in_samples
from krylov_descent.optimizers.result import SCALED_AWAY, Status, StepResult
from krylov_descent.runtime.private import base_of, writes_of
from krylov_descent.runtime.ranks import Ranks, Shard

# The least fraction of the last steps' decrease on C that must be seen on A.
WORTH = 0.5
# The discount factor of older steps, unless the loss falls faster.
MEMORY = 0.7
# Bounds the doublings: if only one set grows, the sets never become all of A.
MOST_DOUBLINGS = 40
# The fingerprint reads this many samples, or up to twice as many.
FINGERPRINT_SAMPLES = 16
FINGERPRINT_BYTES = 6  # of a hash; float64 represents the integer exactly

DOUBLINGS, EXPECTED, PROMISED = "set_doublings", "set_expected", "set_promised"
LOSS = "set_loss"  # on A, before the last step that was taken
SAME_DATA = "set_same_data"  # whether the last step had the data of the step before it
FINGERPRINT = "set_fingerprint"  # of the last step's data; NaN if there is none
ENTRIES = (DOUBLINGS, EXPECTED, PROMISED, LOSS, SAME_DATA, FINGERPRINT)


def least_samples(parameters: FlatParameters) -> int:
    """The smallest initial size of B and C: fewer samples for a large model on a CPU."""
    if parameters.device.type != "cpu":
        return LEAST_FIXED
    return min(LEAST_FIXED, max(LEAST_GROWING, int(overhead_in_samples(parameters))))


def begin(group: dict[str, Any]) -> None:
    """Create missing entries in a parameter group."""
    group.setdefault(DOUBLINGS, 0)
    group.setdefault(EXPECTED, math.nan)
    group.setdefault(PROMISED, 0.0)
    group.setdefault(LOSS, math.nan)
    group.setdefault(SAME_DATA, True)
    group.setdefault(FINGERPRINT, math.nan)


def same_data(group: dict[str, Any], fingerprint: float) -> bool:
    """Whether data with this fingerprint are those of the previous step.

    Without a previous fingerprint (at the first step, or after loading an older state) the previous
    answer is kept.
    """
    if math.isnan(group[FINGERPRINT]):
        return bool(group[SAME_DATA]) and not math.isnan(fingerprint)
    return bool(fingerprint == group[FINGERPRINT])


def forget(group: dict[str, Any]) -> None:
    """Losses before now cannot be compared with those that follow."""
    group[EXPECTED], group[PROMISED] = math.nan, 0.0


def take_all(group: dict[str, Any]) -> None:
    """From now on the sets are all samples."""
    group[DOUBLINGS] = MOST_DOUBLINGS
    forget(group)


def learn(group: dict[str, Any], result: StepResult) -> None:
    """Compare the loss on A with what the previous steps promised, and double the sets if needed.

    Args:
        group: with the entries, which are updated.
        result: of the step.
    """
    if not group[SAME_DATA]:
        forget(group)
        return
    # EXPECTED is the loss on A without the last steps, with older steps discounted.
    seen = group[EXPECTED] - result.loss
    fruitless = result.status is Status.NO_DECREASE and result.reason != SCALED_AWAY
    too_small = fruitless or seen < WORTH * group[PROMISED]
    everything = result.curvature_samples == result.objective_samples == result.samples
    if too_small and not everything:
        group[DOUBLINGS] = min(group[DOUBLINGS] + 1, MOST_DOUBLINGS)
        forget(group)
    elif result.status is Status.MOVED:
        # Where the loss falls by factors, older decreases are larger and would hide the last one.
        memory = MEMORY * min(1.0, result.loss / group[LOSS]) if group[LOSS] > 0 else MEMORY
        group[EXPECTED] = result.loss + (0.0 if math.isnan(seen) else memory * seen)
        group[PROMISED] = memory * group[PROMISED] + result.loss_before - result.loss_after
        group[LOSS] = result.loss


class LastData:
    """The fingerprint of the last step's data, cached without keeping the data alive."""

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._shard: Shard | None = None
        self._own = 0  # this rank's term of the fingerprint

    def __getstate__(self) -> dict[str, Any]:
        return vars(LastData())  # a copy has other tensors, so its cache is empty

    def fingerprint(self, samples: Samples, ranks: Ranks) -> float:
        """The fingerprint of the data of all ranks, independent of how they are sharded.

        It is equal on all ranks. It is NaN, which equals nothing, if the data of a rank are not in
        memory. Computing it waits for a GPU. So this rank's term is cached, as long as the tensors
        are the same objects, or the same views of them, and were not written to.

        Args:
            samples: of this rank.
            ranks: two numbers are gathered from each.
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
            self._own = sum(
                _fingerprint(part, shard if part is batch else Shard(0, part.size, part.size))
                for _, part in batch.parts()
            )
            self._marks, self._shard = [_Mark(tensor) for tensor in tensors], shard


def _fingerprint(batch: Batch, shard: Shard) -> int:
    """This rank's term of the fingerprint, which samples a few rows spread over all ranks' data.

    Each sample adds a hash of its bits and its global index, so the sum over ranks does not depend
    on the shards.
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
    """Recognises a tensor that is the same object, or the same view, and was not written to."""

    def __init__(self, tensor: Tensor) -> None:
        self._owner = weakref.ref(base_of(tensor))
        self._part = _part(tensor)

    def fits(self, tensor: Tensor) -> bool:
        return self._owner() is base_of(tensor) and self._part == _part(tensor)


def _part(tensor: Tensor) -> tuple[Any, ...]:
    # Writes to an inference tensor are not counted, so it never counts as unchanged.
    version = object() if tensor.is_inference() else writes_of(tensor)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), version
