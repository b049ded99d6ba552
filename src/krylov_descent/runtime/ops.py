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

from krylov_descent.runtime.precision import rough_products

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

    @property
    def fuses(self) -> bool:
        """Whether to try `subtract_combination` and `subtract_rows` at all."""
        return False

    def scale_of_length(
        self, squared: Tensor, least: float, before: Tensor, place: Tensor
    ) -> Tensor:
        """1 / √squared, or 0 on breakdown, that is where squared ≤ least · before.

        Args:
            squared: the squared length of a vector, a scalar tensor.
            least: the relative tolerance, a Python number.
            before: the squared length before orthogonalisation, a scalar tensor.
            place: output [1]: squared, or 0 on breakdown.
        """
        vanished = squared <= least * before
        place.copy_(torch.where(vanished, 0.0, squared))
        return torch.where(vanished, 0.0, squared.rsqrt())

    def subtract_combination(
        self, w: Tensor, rows: Tensor, coefficients: Tensor, weights: Tensor
    ) -> bool:
        """Overwrite w [n] with w - weights ∘ Σ coefficients[k] rows[k, :].

        Args:
            w: [n].
            rows: [k, n].
            coefficients: [k].
            weights: [n].

        Returns:
            Whether the operation was done; False leaves w unchanged.
        """
        return False

    def subtract_rows(
        self, start: Tensor, divisor: Tensor | None, rows: Tensor, taken: Tensor, w: Tensor
    ) -> Tensor | None:
        """Overwrite `start` [n] with u = start / divisor - Σ taken[k] rows[k, :].

        Args:
            start: [n]; may be w.
            divisor: [n], or None for 1.
            rows: [k, n].
            taken: [k].
            w: [n], read before `start` is overwritten.

        Returns:
            Partial sums of uᵀw for `scale_of_remainder`, or None if nothing was done.
        """
        return None

    def scale_of_remainder(
        self,
        parts: Tensor,
        taken: Tensor,
        along: Tensor,
        least: float,
        projected: Tensor,
        place: Tensor,
    ) -> Tensor:
        """`scale_of_length` for squared = Σ parts and before = Σ parts + ‖projected‖².

        Args:
            parts: from `subtract_rows`.
            taken: [k].
            along: added to the last entries of `taken` [≤ k].
            least: the relative tolerance, a Python number.
            projected: output [k]: the sum of `taken` and `along`.
            place: output [1], as in `scale_of_length`.
        """
        projected.copy_(taken)
        projected[len(taken) - len(along) :] += along
        squared = parts.sum()
        return self.scale_of_length(squared, least, squared + projected @ projected, place)


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
