"""The networks that curvature products are measured on, each with its loss and one batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.images import autoencoder_problem
from krylov_descent.laboratory.models import autoencoder

MNIST_SIZES = (784, 1000, 500, 250, 30)


@dataclass(frozen=True)
class Workload:
    """A model, its loss and one batch.

    Random data do for timing, but for MNIST's autoencoder: pixels that are black in all images of
    a batch take no arithmetic in a product.
    """

    title: str
    model: nn.Module
    loss: nn.Module
    inputs: Tensor
    targets: Tensor

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters())

    def gradient(self) -> tuple[Tensor, ...]:
        """What everything is measured in: forward, loss, backward, as torch does it."""
        return self.backward(self.value())

    def value(self) -> Tensor:
        """Forward and loss."""
        loss: Tensor = self.loss(self.model(self.inputs), self.targets)
        return loss

    def backward(self, loss: Tensor) -> tuple[Tensor, ...]:
        """The rest of a gradient."""
        return torch.autograd.grad(loss, list(self.model.parameters()))


class Recurrent(nn.Module):
    """A GRU over a sequence and a linear map of its last state: [m, steps, in] to [m, classes]."""

    def __init__(self, inputs: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.GRU(inputs, hidden, batch_first=True)
        self.output = nn.Linear(hidden, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        states: Tensor = self.recurrent(sequence)[0]
        logits: Tensor = self.output(states[:, -1])
        return logits


class Attentive(nn.Module):
    """A transformer's encoder and a linear map of the mean: [m, steps, width] to [m, classes]."""

    def __init__(self, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        logits: Tensor = self.output(self.encoder(sequence).mean(1))
        return logits


def autoencoder_workload(
    device: torch.device, sizes: tuple[int, ...] = MNIST_SIZES, samples: int = 1000
) -> Workload:
    """An autoencoder with its mirror image."""
    with _seeded():
        model = autoencoder(sizes)
        images = torch.rand(samples, sizes[0]).to(device)
    title = f"autoencoder {'-'.join(map(str, sizes))} with its mirror image"
    return Workload(title, model.to(device), nn.BCEWithLogitsLoss(), images, images)


def mnist_workload(device: torch.device, samples: int = 1000) -> Workload:
    """MNIST's autoencoder on its images, or on drawn ones where these are not on the disk."""
    problem, which = autoencoder_problem("mnist-autoencoder", samples, device)
    images = problem.train[0]
    workload = autoencoder_workload(device, samples=samples)
    title = f"{workload.title}, on {which}"
    return replace(workload, title=title, inputs=images, targets=images)


def convolutional_workload(device: torch.device, samples: int = 500) -> Workload:
    """Two convolutions and two linear layers on images 28×28."""
    with _seeded():
        model = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, stride=2), nn.Tanh()),
            *(nn.Conv2d(16, 32, 5, stride=2), nn.Tanh()),
            *(nn.Flatten(), nn.Linear(512, 128), nn.Tanh(), nn.Linear(128, 10)),
        )
        return _classification("CNN", model, torch.randn(samples, 1, 28, 28), device)


def recurrent_workload(device: torch.device, samples: int = 200, steps: int = 28) -> Workload:
    """A GRU that reads an image row by row."""
    with _seeded():
        inputs = torch.randn(samples, steps, 28)
        return _classification("GRU", Recurrent(28, 128, 10), inputs, device)


def attentive_workload(device: torch.device, samples: int = 100, steps: int = 32) -> Workload:
    """A small transformer."""
    with _seeded():
        inputs = torch.randn(samples, steps, 64)
        return _classification("transformer", Attentive(64, 4, 2, 10), inputs, device)


def _classification(title: str, model: nn.Module, inputs: Tensor, device: torch.device) -> Workload:
    targets = torch.randint(0, 10, (len(inputs),))
    return Workload(
        title, model.to(device), nn.CrossEntropyLoss(), inputs.to(device), targets.to(device)
    )


@contextmanager
def _seeded() -> Iterator[None]:
    """The same numbers each time; the global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


WORKLOADS: dict[str, Callable[[torch.device], Workload]] = {
    "autoencoder": mnist_workload,
    "cnn": convolutional_workload,
    "gru": recurrent_workload,
    "transformer": attentive_workload,
}
