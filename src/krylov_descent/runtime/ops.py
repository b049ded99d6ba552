"""The few operations that an engine may replace, with their implementation in torch.

The method calls `operations()` to get the active implementation. By default that is torch's
(`Operations`), which is also the reference for the tests of an engine. An engine activates its own
implementation with a context manager:

    with use(EnginesOwn()):
        losses = operations().cross_entropy(outputs, targets, averaged=True)

Each thread has its own active implementation. Autograd may run a backward pass in another thread,
where the engine's implementation is not active.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from krylov_descent.runtime.precision import forward_precision, rough_products

Result = TypeVar("Result")


class Operations:
    """All operations, implemented with torch."""

    @property
    def may_read(self) -> bool:
        """Whether the host may read computed numbers to decide what to compute next."""
        return True

    def writes_anywhere(self, device: torch.device) -> bool:
        """Whether writing to a slice of a vector is as fast as writing to a separate tensor.

        On a GPU torch's kernels want memory that is aligned to 16 bytes.
        """
        return device.type == "cpu"

    def independent(self, jobs: Iterable[Callable[[], Result]]) -> list[Result]:
        """Run independent jobs and return their results in order.

        The iterable is asked for the next job only after the previous job has run and was released.
        """
        return [job() for job in jobs]

    def begin(self, jobs: Iterable[Callable[[], Result]], at_a_time: int) -> list[Result]:
        """Start independent jobs and return their results in order.

        An engine may run a job concurrently with the code that follows, until that code uses the
        job's result. The caller must not write to anything that a job reads before it has used the
        job's result.

        Args:
            jobs: in the order in which their results are used.
            at_a_time: the most jobs that may run concurrently with the code that follows.
        """
        return self.independent(jobs)

    def cross_entropy(self, outputs: Tensor, targets: Tensor, *, averaged: bool) -> Tensor:
        """Binary cross-entropy Σ -t log σ(z) - (1 - t) log σ(-z) of each sample [m].

        Args:
            outputs: the logits z [m, …].
            targets: t, of the same shape.
            averaged: whether to divide the sum by the number of elements of a sample.
        """
        elements = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        rows = elements.reshape(len(elements), -1)
        return rows.mean(1) if averaged else rows.sum(1)

    def ones(self, losses: Tensor) -> Tensor:
        """Ones [m]: the cotangent that differentiates the sum of the losses [m]."""
        return torch.ones_like(losses)

    def sums_over_rows(self, x: Tensor, ones: Tensor, out: Tensor | None = None) -> Tensor:
        """Σ x over rows [n], as a product: on a GPU torch's sum takes several times as long.

        Args:
            x: [m, n].
            ones: [1, m].
            out: for the result [n]; a new vector by default.
        """
        row = None if out is None else out.unsqueeze(0)
        return torch.mm(ones, x, out=row).squeeze(0)

    def sums_over_samples(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sums δᵀx, (δ²)ᵀx², Σ δ and Σ δ² over samples; (δ²)ᵀx² may be computed in tf32.

        Args:
            x: [m, inputs].
            delta: δ [m, outputs].
        """
        squared = delta.square()
        with rough_products(delta.device):
            squares = squared.t() @ x.square()
        # Products with ones: on a GPU torch's sum over rows takes several times as long.
        ones = delta.new_ones(len(delta))
        return delta.t() @ x, squares, ones @ delta, ones @ squared

    def project(self, rows: Tensor, vector: Tensor) -> Tensor:
        """The inner products [k] of rows [k, n] with a vector [n]."""
        return rows @ vector

    def combine(self, rows: Tensor, coefficients: Tensor, start: Tensor | None = None) -> Tensor:
        """start + Σ coefficients[k] rows[k, :], a new vector [n].

        Args:
            rows: [k, n].
            coefficients: [k].
            start: [n]; zero by default.
        """
        if start is None:
            return rows.t() @ coefficients
        return torch.addmv(start, rows.t(), coefficients)

    def subtract(self, vector: Tensor, rows: Tensor, coefficients: Tensor) -> Tensor:
        """Overwrite a vector [n] with vector - Σ coefficients[k] rows[k, :], and return it."""
        return vector.addmv_(rows.t(), coefficients, alpha=-1)

    def gram(self, rows: Tensor) -> Tensor:
        """The inner products [k, k] between rows [k, n], in the precision of forward passes."""
        with forward_precision():
            return rows @ rows.t()


_torchs = Operations()
_current: ContextVar[Operations] = ContextVar("operations", default=_torchs)


def operations() -> Operations:
    """The active implementation of this thread."""
    return _current.get()


@contextmanager
def use(own: Operations) -> Iterator[None]:
    """Context manager that makes `operations()` return `own` in this thread."""
    token = _current.set(own)
    try:
        yield
    finally:
        _current.reset(token)
