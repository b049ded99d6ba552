"""Jobs that do not depend on each other: on parallel branches of a CUDA graph that is recorded.

The products of one layer rarely fill a GPU. `side_by_side` waits for all jobs before anything else
goes on; `begin` lets that go on at once, up to where something that they make is read.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from krylov_descent.cuda.triton.entry import under_way

BRANCHES = 16

Result = TypeVar("Result")


@dataclass(slots=True)
class _Branches:
    """Who has which branch.

    A job may have jobs side by side itself. The branches that it takes for them stay with it until
    all jobs beside it are done, too: what was made on a branch is read elsewhere, and its memory is
    free for that branch again as soon as Python is done with it. Another job, which does not wait
    for the first, would write there while it is still read.

    Attributes:
        taken: by any job.
        own: what the job under way has taken so far; None where there is no job under way.
        open: with jobs that were begun, and not waited for yet.
    """

    taken: set[torch.cuda.Stream] = field(default_factory=set)
    own: list[torch.cuda.Stream] | None = None
    open: set[torch.cuda.Stream] = field(default_factory=set)

    def take(self, count: int) -> list[torch.cuda.Stream]:
        """So many branches at most, first those that the job under way had before."""
        own = self.own or []
        free = [branch for branch in _branches() if branch not in self.taken]
        found = [*own, *free][:count]
        self.taken.update(found)
        return found


_known = _Branches()


def side_by_side(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run independent jobs; where they are recorded as a CUDA graph, on parallel branches of it."""
    products = under_way()
    if products is not None:
        products.materialise()  # what all jobs may read
        jobs = [partial(_materialised, products, job) for job in jobs]
    if not is_recorded():
        return [job() for job in jobs]
    current, outer = torch.cuda.current_stream(), _known.own
    here, mine = current.record_event(), _known.take(len(jobs))
    branches, used, results = mine or [current], list(mine), list[Result]()
    try:
        for branch in branches:
            branch.wait_event(here)
        # Set by hand: a context for each job would take as long as the job.
        for job, branch in zip(jobs, itertools.cycle(branches), strict=False):
            _known.own = []
            torch.cuda.set_stream(branch)
            results.append(job())
            used += _known.own
    finally:
        torch.cuda.set_stream(current)
        _known.own = outer
        if outer is None:
            _known.taken.clear()
        else:
            outer += [branch for branch in used if branch not in outer]
    for branch in branches:
        current.wait_stream(branch)
    return results


def begin(jobs: Sequence[Callable[[], Result]], at_a_time: int = BRANCHES) -> list[Result]:
    """Run independent jobs, which what follows does not wait for, where they are recorded.

    Operations on what they make wait for it if they pass by `TensorCoreProducts`; all else has to
    be behind `join`. Until that nothing may be written to what the jobs read. They have no jobs of
    their own.

    Args:
        jobs: in the order in which their results are needed.
        at_a_time: how many of them; the fewer, the less they take from what follows.
    """
    if not is_recorded() or _known.own is not None:
        return side_by_side(jobs)
    products = under_way()
    if products is not None:
        products.materialise()
        jobs = [partial(_noted, products, job) for job in jobs]
    current, results = torch.cuda.current_stream(), list[Result]()
    now = current.record_event()
    try:
        for job, branch in zip(jobs, itertools.cycle(_branches()[:at_a_time]), strict=False):
            branch.wait_event(now)
            _known.open.add(branch)
            torch.cuda.set_stream(branch)
            results.append(job())
    finally:
        torch.cuda.set_stream(current)
    return results


def join() -> None:
    """Wait for all jobs that were begun.

    Not within a job, where one beside it needs them, too: it would not wait any more.
    """
    for branch in _known.open:
        torch.cuda.current_stream().wait_stream(branch)
    _known.open.clear()


@contextmanager
def all_joined() -> Iterator[None]:
    """For the time of a recording; in the end all that was begun is waited for."""
    _known.open.clear()  # of a recording that failed
    try:
        yield
    except BaseException:
        # Also by one that fails: what is left open would be held for good.
        with suppress(RuntimeError):  # which CUDA may have ended already
            _join_all()
        _known.open.clear()
        raise
    join()


def _join_all() -> None:
    current = torch.cuda.current_stream()
    for branch in _branches():
        with torch.cuda.stream(branch):
            recorded = torch.cuda.is_current_stream_capturing()
        if recorded:
            current.wait_stream(branch)


def is_recorded() -> bool:
    """Whether this stream is captured as a part of a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _materialised(products: Any, job: Callable[[], Result]) -> Result:
    """Of a job, with all that it computes made on its own branch."""
    result = job()
    products.materialise()
    return result


def _noted(products: Any, job: Callable[[], Result]) -> Result:
    """Of a job, with a note for those who look at its result where it is made."""
    result = _materialised(products, job)
    products.note_made(result)
    return result


def _branches() -> list[torch.cuda.Stream]:
    return _streams(torch.cuda.current_device())


@functools.cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES)]
