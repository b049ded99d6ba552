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
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from krylov_descent.runtime.precision import forward_precision, rough_products

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Span:
    """Some of the rows of a matrix, which only the device knows.

    Attributes:
        ends: the first row, and the one behind the last, int64 [2]. A negative number means 0.
        most: the most rows; results have so many entries, and zeros behind the last row.
    """

    ends: Tensor
    most: int

    def indices(self, rows: int) -> tuple[Tensor, Tensor]:
        """The numbers of the rows [most], and whether each is within the span [most].

        Args:
            rows: rows of the matrix.
        """
        first, behind = self.ends.clamp(min=0).unbind()
        index = first + torch.arange(self.most, device=self.ends.device)
        return index.clamp(max=rows - 1), index < behind


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
        squared = _squares(delta)
        with rough_products(delta.device):
            squares = squared.t() @ _squares(x)
        # Products with ones: on a GPU torch's sum over rows takes several times as long.
        ones = delta.new_ones(len(delta))
        return delta.t() @ x, squares, ones @ delta, ones @ squared

    def project(self, rows: Tensor, vector: Tensor, span: Span | None = None) -> Tensor:
        """The inner products [k] of rows [k, n] with a vector [n]; of the rows of a span alone."""
        found = rows @ vector
        if span is None:
            return found
        index, inside = span.indices(len(rows))
        return torch.where(inside, found[index], 0.0)

    def combine(
        self,
        rows: Tensor,
        coefficients: Tensor,
        start: Tensor | None = None,
        span: Span | None = None,
    ) -> Tensor:
        """start + Σ coefficients[k] rows[k, :], a new vector [n].

        Args:
            rows: [k, n]; all of them are finite, also those outside of the span.
            coefficients: [k], or one for each row of the span.
            start: [n]; zero by default.
            span: the rows to combine; all by default.
        """
        if span is not None:
            coefficients = _spread(rows, coefficients, span)
        if start is None:
            return rows.t() @ coefficients
        return torch.addmv(start, rows.t(), coefficients)

    def subtract(
        self, vector: Tensor, rows: Tensor, coefficients: Tensor, span: Span | None = None
    ) -> Tensor:
        """Overwrite a vector [n] with vector - Σ coefficients[k] rows[k, :], and return it.

        The arguments are those of `combine`.
        """
        if span is not None:
            coefficients = _spread(rows, coefficients, span)
        return vector.addmv_(rows.t(), coefficients, alpha=-1)

    def write_row(self, rows: Tensor, place: Tensor, vector: Tensor, scale: Tensor) -> None:
        """Overwrite a row with a vector [n] times a scale.

        Args:
            rows: [k, n].
            place: the number of the row, int64 [1].
            vector: [n].
            scale: a tensor of one number.
        """
        rows.index_copy_(0, place, (vector * scale).unsqueeze(0))

    def gram(self, rows: Tensor, span: Span | None = None) -> Tensor:
        """The inner products [k, k] between rows [k, n], in the precision of forward passes.

        Args:
            rows: [k, n]; those outside of the span are zero.
            span: the rows that are not zero, beginning with the first; all by default.
        """
        with forward_precision():
            return rows @ rows.t()


def _squares(numbers: Tensor) -> Tensor:
    """The squares. On a CPU, where subnormal numbers slow down products tenfold, those are zero."""
    if numbers.device.type == "cpu":
        return functional.hardshrink(numbers, torch.finfo(numbers.dtype).tiny ** 0.5).square_()
    return numbers.square()


def _spread(rows: Tensor, coefficients: Tensor, span: Span) -> Tensor:
    """The coefficients of all rows, from those of the rows of a span."""
    index, inside = span.indices(len(rows))
    return coefficients.new_zeros(len(rows)).index_add(
        0, index, torch.where(inside, coefficients, 0.0)
    )


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
