"""Jobs that do not depend on each other: on parallel branches of a CUDA graph that is recorded."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from krylov_descent.tensor_cores.entry import under_way

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
    """

    taken: set[torch.cuda.Stream] = field(default_factory=set)
    own: list[torch.cuda.Stream] | None = None

    def take(self, count: int) -> list[torch.cuda.Stream]:
        """So many branches at most, first those that the job under way had before."""
        own = self.own or []
        free = [b for b in _all_branches(torch.cuda.current_device()) if b not in self.taken]
        found = [*own, *free][:count]
        self.taken.update(found)
        return found


_known = _Branches()


def side_by_side(jobs: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run independent jobs; where they are recorded as a CUDA graph, on parallel branches of it.

    The products of one layer rarely fill a GPU.
    """
    products = under_way()
    if products is not None:
        products.settle()  # what all jobs may read
        jobs = [partial(_settled, products, job) for job in jobs]
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
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


def _settled(products: Any, job: Callable[[], Result]) -> Result:
    """Of a job, with all that it computes made on its own branch."""
    result = job()
    products.settle()
    return result


@functools.cache
def _all_branches(device: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(BRANCHES)]
