"""The few operations of the method that an engine may replace, and torch's own way of each.

The method asks `operations()` for those of the moment. Outside of an engine they are torch's
(`Operations`), which are also what an engine's operations are tested against. An engine puts its
own in their place for a while:

    with use(EnginesOwn()):
        losses = operations().cross_entropy(outputs, targets, averaged=True)

Each thread has operations of its own. Autograd may run a backward pass in another thread, where
those of an engine are not seen.
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
    """Torch's own way of all operations."""

    @property
    def may_read(self) -> bool:
        """Whether numbers that were computed can be read, to decide how to go on."""
        return True

    def writes_anywhere(self, device: torch.device) -> bool:
        """Whether operations write to any piece of a vector as fast as to a tensor of its own.

        On a GPU torch's kernels want memory that begins at a multiple of 16 bytes.
        """
        return device.type == "cpu"

    def independent(self, jobs: Iterable[Callable[[], Result]]) -> list[Result]:
        """The results of jobs that do not depend on each other, in their order.

        A job is taken from the iterable when the one before it is done, which is let go then.
        """
        return [job() for job in jobs]

    def begin(self, jobs: Iterable[Callable[[], Result]], at_a_time: int) -> list[Result]:
        """Likewise; what follows need not wait for a job until it uses the job's result.

        Nothing that a job reads may be written to before its result was used.

        Args:
            jobs: in the order in which their results are used.
            at_a_time: how many of them may run beside what follows.
        """
        return self.independent(jobs)

    def cross_entropy(self, outputs: Tensor, targets: Tensor, *, averaged: bool) -> Tensor:
        """Σ -t log σ(z) - (1 - t) log σ(-z) over each sample's elements [m], in autograd's graph.

        Args:
            outputs: z [m, …].
            targets: t, of the same shape.
            averaged: whether to divide by the number of a sample's elements.
        """
        elements = functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
        rows = elements.reshape(len(elements), -1)
        return rows.mean(1) if averaged else rows.sum(1)

    def ones(self, losses: Tensor) -> Tensor:
        """A one for each loss [m], to differentiate their sum with."""
        return torch.ones_like(losses)

    def sums_over_rows(self, x: Tensor, ones: Tensor, out: Tensor | None = None) -> Tensor:
        """Σ x over rows [n].

        Args:
            x: [m, n].
            ones: [1, m]. A product with them, because on a GPU torch's sum over rows takes several
                times as long.
            out: for the result [n]; a new vector where not given.
        """
        row = None if out is None else out.unsqueeze(0)
        return torch.mm(ones, x, out=row).squeeze(0)

    def sums_over_samples(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """δᵀx, (δ²)ᵀx², Σ δ and Σ δ² over samples; the second with the digits of tf32 at least.

        Args:
            x: [m, inputs].
            delta: δ [m, outputs].
        """
        squared = delta.square()
        with rough_products(delta.device):
            squares = squared.t() @ x.square()
        # Products, because on a GPU a sum over rows takes several times as long.
        ones = delta.new_ones(len(delta))
        return delta.t() @ x, squares, ones @ delta, ones @ squared

    @property
    def fuses(self) -> bool:
        """Whether `subtract_combination` and `subtract_rows` are worth a try."""
        return False

    def scale_of_length(
        self, squared: Tensor, least: float, before: Tensor, place: Tensor
    ) -> Tensor:
        """1 / √squared, or 0 where squared ≤ least · before.

        Args:
            squared: a number.
            least: a number of the host.
            before: a number.
            place: for squared, or 0 likewise [1].
        """
        vanished = squared <= least * before
        place.copy_(torch.where(vanished, 0.0, squared))
        return torch.where(vanished, 0.0, squared.rsqrt())

    def subtract_combination(
        self, w: Tensor, rows: Tensor, coefficients: Tensor, weights: Tensor
    ) -> bool:
        """W - weights ∘ Σ coefficients[k] rows[k, :] in place of w [n]; False where left undone.

        Args:
            w: [n].
            rows: [k, n].
            coefficients: [k].
            weights: [n].
        """
        return False

    def subtract_rows(
        self, start: Tensor, divisor: Tensor | None, rows: Tensor, taken: Tensor, w: Tensor
    ) -> Tensor | None:
        """Start / divisor - Σ taken[k] rows[k, :] in place of the start [n].

        Args:
            start: [n], which may be w.
            divisor: [n], or None for 1.
            rows: [k, n].
            taken: [k].
            w: [n].

        Returns:
            Parts of the result's product with w, for `scale_of_remainder`; None where nothing is
            done.
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
        """`scale_of_length` of Σ parts, where before is that and the squares of projected.

        Args:
            parts: by `subtract_rows`.
            taken: [k].
            along: added to the last of them [≤ k].
            least: a number of the host.
            projected: for the sums [k].
            place: for the squared length [1].
        """
        projected.copy_(taken)
        projected[len(taken) - len(along) :] += along
        squared = parts.sum()
        return self.scale_of_length(squared, least, squared + projected @ projected, place)


_torchs = Operations()
_current: ContextVar[Operations] = ContextVar("operations", default=_torchs)


def operations() -> Operations:
    """Those of this moment, in this thread."""
    return _current.get()


@contextmanager
def use(own: Operations) -> Iterator[None]:
    """Have `operations()` give these for a while, in this thread."""
    token = _current.set(own)
    try:
        yield
    finally:
        _current.reset(token)
