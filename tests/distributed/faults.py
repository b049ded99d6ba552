"""Errors at any place of a step on one of several ranks, and what becomes of all of them.

A step is a row of exchanges with work between them. `sweep` raises an error on one rank just before
an exchange, or in one of the operations of torch, for as many of them as it is asked for. Tests
take a few; `large_sweep`, which `python -m tests.distributed.faults` calls, takes all exchanges and
many operations.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from krylov_descent import KroneckerFactors
from krylov_descent.optimizers.base import DataOptimizer
from krylov_descent.runtime.ranks import Ranks
from tests.distributed.group import Group
from tests.distributed.work import SAMPLES, make, own, rank
from tests.optimizers.nets import classes, net, parameters_of

Place = Literal["exchange", "operation"]
PATIENCE = 5.0  # seconds within which all ranks have ended
SHARDS = {2: [30, 31], 3: [40, 0, 21]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "ksd": ("ksd", {}),
    "ksd, sharded": ("ksd", {"basis": "sharded"}),
    "ksd, identity": ("ksd", {"preconditioner": "identity"}),
    "ksd, kronecker": ("ksd", {"preconditioner": KroneckerFactors(after=0)}),
    "ksd, sets that grow": ("ksd", {"subset_size": "auto"}),
    "ksd, lr": ("ksd", {"lr": 0.5}),
    "hf": ("hf", {}),
    "ncg": ("ncg", {}),
}


class InjectedError(MemoryError):
    """The error that a rank is made to meet."""


@dataclass
class Countdown:
    """Raises at one call out of many.

    Not counted are calls of the exchange with which ranks meet, and those behind the last one,
    which put tensors in their places.
    """

    ranks: Ranks
    left: int
    calls: int = 0

    def __call__(self) -> None:
        if self.ranks._phase == "check" or self.ranks._settled:
            return
        self.calls += 1
        self.left -= 1
        if self.left == 0:
            raise InjectedError("no room on this rank")


class Operations(TorchFunctionMode):
    """Counts the operations of torch."""

    def __init__(self, count: Countdown) -> None:
        super().__init__()
        self._count = count

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not str(func).startswith("profiler"):  # of torch's own, around a step
            self._count()
        return func(*args, **(kwargs or {}))


@contextmanager
def faulty(ranks: Ranks, place: Place, number: int) -> Iterator[Countdown]:
    """An error at one exchange, or operation, of what follows; none at number 0."""
    count = Countdown(ranks, number)
    if place == "operation":
        with Operations(count):
            yield count
        return
    exchange = ranks._exchange

    def counted(*arguments: Any) -> Any:
        count()
        return exchange(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_exchange", counted)
        yield count


def state_of(optimizer: DataOptimizer) -> Tensor:
    vectors = [v.reshape(-1) for state in optimizer.state.values() for v in state.values()]
    return torch.cat([torch.empty(0, dtype=torch.float64), *vectors])


def step_with_a_fault(case: str, place: Place, where: int, number: int) -> dict[str, Any]:
    """A second step, in which one rank meets an error; and whether a third one works.

    Args:
        case: of `CASES`.
        place: of the error.
        where: the rank.
        number: of the exchange, or operation, from 1; 0 for no error.
    """
    name, options = CASES[case]
    model = net(torch.float64)
    optimizer = make(name, model, **options)
    ranks = optimizer.objective.ranks
    data = own(classes(SAMPLES, torch.float64), SHARDS[ranks.size])
    optimizer.step(data)
    before, state = parameters_of(model), state_of(optimizer)
    started = time.monotonic()
    error = message = ""
    with faulty(ranks, place, number if rank() == where else 0) as count:
        try:
            optimizer.step(data)
        except Exception as problem:
            error, message = type(problem).__name__, str(problem)
    seconds = time.monotonic() - started
    unchanged = torch.equal(parameters_of(model), before)
    same_state = torch.equal(state_of(optimizer), state)
    return {
        "calls": count.calls,
        "error": error,
        "message": message,
        "soon": seconds < PATIENCE,
        "unchanged": unchanged and same_state,
        "goes on": goes_on(optimizer, data),
    }


def goes_on(optimizer: DataOptimizer, data: Any) -> str:
    try:
        return str(optimizer.step(data).status.name)
    except Exception as problem:
        return repr(problem)


def complaints(told: list[dict[str, Any]], where: int) -> list[str]:
    """What is not as it should be after an error on one rank."""
    found = []
    for rank_, one in enumerate(told):
        expected = "InjectedError" if rank_ == where else "RankError"
        if one["error"] != expected:
            found.append(f"rank {rank_} ended with {one['error'] or 'nothing'} {one['message']}")
        if expected == "RankError" and f"rank {where} failed with Inj" not in one["message"]:
            found.append(f"rank {rank_} was told {one['message']!r}")
        if not (one["soon"] and one["unchanged"] and one["goes on"] == "MOVED"):
            found.append(f"rank {rank_}: {one}")
    return found


def sweep(
    group: Group, case: str, place: Place, wanted: int | None = None
) -> tuple[int, list[str]]:
    """Errors on each rank in turn, at places that are spread evenly over a step.

    Args:
        group: of ranks.
        case: of `CASES`.
        place: before exchanges, or in operations.
        wanted: how many errors on each rank; one at every place if left out.

    Returns:
        How many errors were made, and complaints about what followed.
    """
    counts = [one["calls"] for one in group.run(step_with_a_fault, case, place, -1, 0)]
    made, found = 0, []
    for where, count in enumerate(counts):
        numbers = torch.linspace(1, count, min(wanted or count, count)).long().tolist()
        for number in dict.fromkeys(numbers):
            told = group.run(step_with_a_fault, case, place, where, number)
            if told[where]["calls"] < number:  # the first step of a process makes a few more
                continue
            made += 1
            found += [f"{case}, {place} {number} on {where}: {c}" for c in complaints(told, where)]
    return made, found


def large_sweep(operations: int = 100) -> tuple[int, list[str]]:
    """Errors before all exchanges, and in so many operations, on two and three ranks; as `sweep`.

    About 5,700 errors, in half an hour on an idle machine of two cores.
    """
    total, found = 0, list[str]()
    places: dict[Place, int | None] = {"exchange": None, "operation": operations}
    for size in SHARDS:
        group = Group(size)
        for case in CASES:
            for place, wanted in places.items():
                made, wrong = sweep(group, case, place, wanted)
                total, found = total + made, found + wrong
                print(f"{size} ranks, {case}, {place}: {made} errors, {len(wrong)} complaints")
        group.close()
    return total, found


if __name__ == "__main__":
    errors, wrong = large_sweep()
    print("\n".join([f"{errors} errors, {len(wrong)} complaints", *wrong]))
    sys.exit(bool(wrong))
