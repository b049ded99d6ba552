"""What the machine does in a second: in a plain gradient, and at best."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.capture import captured
from benchmarks.flops import LinearStack
from benchmarks.timing import timed
from benchmarks.workloads import Workload

Precision = Literal["float32", "tf32"]
# Large enough that nothing but arithmetic counts.
PEAK_SIZE = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, kw_only=True)
class GradientRate:
    """Operations a second in torch's own gradient of one batch.

    `precision` is that of the backward pass, `forward` that of the forward pass. `captured` is the
    same as one CUDA graph, without the launches; None on a CPU. The faster of the two is what a
    step is held against.
    """

    batch: int
    precision: Precision
    forward: Precision
    eager: float
    captured: float | None

    @property
    def best(self) -> float:
        """The rate of the faster form."""
        return max(self.eager, self.captured or 0.0)

    def as_json(self) -> dict[str, Any]:
        """For the results."""
        return asdict(self) | {"best": self.best}


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """How a GPU multiplies float32 matrices meanwhile."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class GradientTimer:
    """Times torch's plain gradient of one batch, as often as it is asked to.

    It is asked between the steps that are held against it, so that both see the same machine.

    Args:
        model: an autoencoder that nobody else uses: autograd remembers a model's streams.
        loss: its loss.
        inputs: the batch, which is also the targets.
        precision: of the matrix products in the backward pass.
        forward: of those in the forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        inputs: Tensor,
        precision: Precision,
        forward: Precision,
    ) -> None:
        self._workload = Workload("", model, loss, inputs, inputs)
        self._flops = len(inputs) * LinearStack.of(model).gradient
        self._batch, self._device = len(inputs), inputs.device
        self._precision, self._forward = precision, forward
        self._eager: list[float] = []
        self._captured: list[float] = []
        self._replay: Callable[[], None] | None = None
        self._gradient()  # libraries set themselves up
        if self._device.type == "cuda":
            self._replay = captured(self._gradient)

    def _gradient(self) -> None:
        with matmul_precision(self._forward):
            loss = self._workload.value()
        with matmul_precision(self._precision):
            self._workload.backward(loss)

    def sample(self) -> None:
        """Once more."""
        self._eager.append(timed(self._gradient, self._device)[0])
        if self._replay is not None:
            self._captured.append(timed(self._replay, self._device)[0])

    def rate(self) -> GradientRate:
        """The medians of all samples as rates."""
        eager, replayed = (
            self._flops / statistics.median(seconds) if seconds else None
            for seconds in (self._eager, self._captured)
        )
        assert eager is not None
        return GradientRate(
            batch=self._batch,
            precision=self._precision,
            forward=self._forward,
            eager=eager,
            captured=replayed,
        )


def peak_rate(
    device: torch.device, precision: Precision, repeats: int, size: int | None = None
) -> float:
    """Operations a second in the product of two large matrices."""
    size = size or PEAK_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device) for _ in range(2))
    with matmul_precision(precision):
        torch.mm(left, right)
        seconds = [timed(lambda: torch.mm(left, right), device)[0] for _ in range(repeats)]
    return 2 * size**3 / statistics.median(seconds)
