"""Independent jobs on parallel branches of the CUDA graph that is being recorded.

The products of one layer rarely fill a GPU. `side_by_side` joins all jobs before the next kernel.
After `begin`, later kernels run in parallel to the jobs until they read a result of one.
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
    """Allocation of branches (streams) to jobs.

    A job may itself run jobs side by side. It keeps their branches until all of its sibling jobs
    are done. Otherwise a sibling could reuse a branch without waiting for the first job: the
    allocator gives memory back to its branch as soon as Python drops the tensor, so the sibling
    would overwrite a tensor that other branches still read.

    Attributes:
        taken: branches taken by any job.
        own: branches that the running job has taken so far; None outside of jobs.
        open: branches whose jobs were begun and not joined yet.
    """

    taken: set[torch.cuda.Stream] = field(default_factory=set)
    own: list[torch.cuda.Stream] | None = None
    open: set[torch.cuda.Stream] = field(default_factory=set)

    def take(self, count: int) -> list[torch.cuda.Stream]:
        """At most `count` branches; those that the running job has taken come first."""
        own = self.own or []
        free = [branch for branch in _branches() if branch not in self.taken]
        found = [*own, *free][:count]
        self.taken.update(found)
        return found


_known = _Branches()


def side_by_side(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run independent jobs, on parallel branches if a CUDA graph is being recorded."""
    products = under_way()
    if products is not None:
        products.materialise()  # any job may read them
        jobs = [partial(_materialised, products, job) for job in jobs]
    if not is_recorded():
        return [job() for job in jobs]
    current, outer = torch.cuda.current_stream(), _known.own
    here, mine = current.record_event(), _known.take(len(jobs))
    branches, used, results = mine or [current], list(mine), list[Result]()
    try:
        for branch in branches:
            branch.wait_event(here)
        # Without a context manager, which would take as long as a job.
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
    """Run independent jobs; in a recording, later kernels do not wait for them.

    Operations dispatched by `TensorCoreProducts` wait for the results they read; others must come
    after `join`. Until `join` nothing may write to what the jobs read. Jobs cannot be nested.

    Args:
        jobs: in the order in which their results are needed.
        at_a_time: how many run in parallel; fewer leave more of the GPU to later kernels.
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

    Must not be called within a job: its siblings would then not wait any more.
    """
    for branch in _known.open:
        torch.cuda.current_stream().wait_stream(branch)
    _known.open.clear()


@contextmanager
def all_joined() -> Iterator[None]:
    """Context of a recording: joins all open branches at its end."""
    _known.open.clear()  # left over from a recording that failed
    try:
        yield
    except BaseException:
        # A failed recording must join its branches too, or their memory is never freed.
        with suppress(RuntimeError):  # CUDA may have ended the capture already
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
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _materialised(products: Any, job: Callable[[], Result]) -> Result:
    """Run a job and materialise its lazy products on its own branch."""
    result = job()
    products.materialise()
    return result


def _noted(products: Any, job: Callable[[], Result]) -> Result:
    """Run a job and note its stream, so that readers on other streams wait for its result."""
    result = _materialised(products, job)
    products.note_made(result)
    return result


def _branches() -> list[torch.cuda.Stream]:
    return _streams(torch.cuda.current_device())


@functools.cache
def _streams(device: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES)]
