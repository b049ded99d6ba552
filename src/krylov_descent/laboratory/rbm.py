"""Greedy pretraining with restricted Boltzmann machines (Hinton & Salakhutdinov 2006).

Each layer is trained with one step of contrastive divergence (CD-1) on the means of the layer
below, then the stack is unrolled: the weights go up the encoder (or classifier) and, transposed,
down the decoder. Hidden units are binary; those of a linear code layer are Gaussian with unit
variance around a linear mean, and learn a hundred times slower.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from krylov_descent.laboratory.models import linear_layers


@dataclass(frozen=True, kw_only=True)
class RbmSettings:
    """The settings of Hinton & Salakhutdinov 2006 (supporting material and program)."""

    epochs: int = 50
    batch_size: int = 100
    learning_rate: float = 0.1
    linear_learning_rate: float = 0.001
    initial_momentum: float = 0.5
    final_momentum: float = 0.9
    epochs_of_initial_momentum: int = 5
    weight_decay: float = 2e-4
    initial_deviation: float = 0.1

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(
                f"`epochs` and `batch_size` must be at least 1, found {self.epochs} and "
                f"{self.batch_size}"
            )


@dataclass(frozen=True)
class PretrainingEpoch:
    """What a pass over the data reports: `error` is squared, per sample, of one reconstruction."""

    layer: int
    layers: int
    epoch: int
    epochs: int
    error: float

    def __str__(self) -> str:
        """One line for a progress display."""
        return (
            f"layer {self.layer}/{self.layers}, epoch {self.epoch}/{self.epochs}: "
            f"reconstruction error {self.error:.3f}"
        )


Report = Callable[[PretrainingEpoch], None]


class Rbm:
    """Weights [visible, hidden], both biases, and the momentum of each.

    Args:
        visible: number of visible units, always logistic.
        hidden: number of hidden units.
        linear: whether the hidden units are Gaussian around a linear mean, not binary.
        settings: how it learns.
        generator: of the starting weights and of every sample; it decides the device.
        dtype: of all tensors.
    """

    def __init__(
        self,
        visible: int,
        hidden: int,
        *,
        linear: bool,
        settings: RbmSettings,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.linear = linear
        self.settings = settings
        self.generator = generator
        device = generator.device
        self.weight = settings.initial_deviation * torch.randn(
            visible, hidden, generator=generator, device=device, dtype=dtype
        )
        self.visible_bias = torch.zeros(visible, device=device, dtype=dtype)
        self.hidden_bias = torch.zeros(hidden, device=device, dtype=dtype)
        self._velocities = [torch.zeros_like(part) for part in self._parts]

    @property
    def _parts(self) -> list[Tensor]:
        return [self.weight, self.visible_bias, self.hidden_bias]

    def hidden_mean(self, visible: Tensor) -> Tensor:
        """E[h | v], [n, visible] to [n, hidden]: what the next layer learns from."""
        total = torch.addmm(self.hidden_bias, visible, self.weight)
        return total if self.linear else torch.sigmoid(total)

    def visible_mean(self, hidden: Tensor) -> Tensor:
        """E[v | h], [n, hidden] to [n, visible]."""
        return torch.sigmoid(torch.addmm(self.visible_bias, hidden, self.weight.T))

    def draw_noise(self, count: int) -> Tensor:
        """The random numbers of `count` samples [count, hidden]: uniform, or normal if linear."""
        draw = torch.randn if self.linear else torch.rand
        return draw(
            count,
            len(self.hidden_bias),
            generator=self.generator,
            device=self.weight.device,
            dtype=self.weight.dtype,
        )

    def update(self, batch: Tensor, noise: Tensor, momentum: float) -> Tensor:
        """One CD-1 update, in place; the summed squared error of the reconstruction [].

        Only the hidden states that drive the reconstruction are sampled; means everywhere else
        leave less noise in the statistics. Costs five products of batch and weights.
        """
        rate = self.settings.linear_learning_rate if self.linear else self.settings.learning_rate
        means = self.hidden_mean(batch)
        states = means + noise if self.linear else (means > noise).to(means.dtype)
        reconstruction = self.visible_mean(states)
        reconstructed_means = self.hidden_mean(reconstruction)
        directions = [
            (batch.T @ means - reconstruction.T @ reconstructed_means) / len(batch)
            - self.settings.weight_decay * self.weight,
            (batch - reconstruction).mean(0),
            (means - reconstructed_means).mean(0),
        ]
        for part, velocity, direction in zip(
            self._parts, self._velocities, directions, strict=True
        ):
            velocity.mul_(momentum).add_(direction, alpha=rate)
            part.add_(velocity)
        return (batch - reconstruction).square().sum()


@torch.no_grad()
def train_rbm(data: Tensor, rbm: Rbm, report: Callable[[int, float], None]) -> None:
    """Train on data [n, visible] in shuffled mini-batches; `report(epoch, error)` after each pass.

    Raises:
        FloatingPointError: the weights diverged.
    """
    settings = rbm.settings
    for epoch in range(1, settings.epochs + 1):
        late = epoch > settings.epochs_of_initial_momentum
        momentum = settings.final_momentum if late else settings.initial_momentum
        order = torch.randperm(len(data), generator=rbm.generator, device=data.device)
        total = torch.zeros((), device=data.device, dtype=torch.float64)
        for indices in order.split(settings.batch_size):
            total += rbm.update(data[indices], rbm.draw_noise(len(indices)), momentum)
        error = total.item() / len(data)
        if not rbm.weight.isfinite().all():
            raise FloatingPointError(
                f"the RBM diverged in epoch {epoch}: choose a smaller `learning_rate` or "
                "`linear_learning_rate` in its settings"
            )
        report(epoch, error)


@torch.no_grad()
def pretrain_autoencoder(
    model: nn.Sequential,
    data: Tensor,
    seed: int,
    *,
    settings: RbmSettings | None = None,
    report: Report | None = None,
) -> None:
    """Set the weights of an autoencoder from `models.autoencoder` by pretraining its encoder.

    Args:
        model: changed in place.
        data: training inputs [n, visible] in [0, 1], on the model's device and of its dtype.
        seed: of all random numbers.
        settings: those of the 2006 paper if left out.
        report: called after each epoch of each layer.
    """
    maps = linear_layers(model)
    depth = len(maps) // 2
    stack = _train_stack(maps[:depth], data, _generator(data, seed), settings, report)
    for i, rbm in enumerate(stack):
        _copy(maps[i][0], rbm.weight.T, rbm.hidden_bias)
        _copy(maps[-1 - i][0], rbm.weight, rbm.visible_bias)


@torch.no_grad()
def pretrain_classifier(
    model: nn.Sequential,
    data: Tensor,
    seed: int,
    *,
    settings: RbmSettings | None = None,
    report: Report | None = None,
) -> None:
    """Set the weights of a network from `models.classifier` by pretraining its hidden layers.

    The labels are not used. The output layer, which no RBM precedes, starts from N(0, 0.1²) with
    zero biases. The arguments are those of `pretrain_autoencoder`.
    """
    maps = linear_layers(model)
    generator = _generator(data, seed)
    stack = _train_stack(maps[:-1], data, generator, settings, report)
    for (layer, _), rbm in zip(maps[:-1], stack, strict=True):
        _copy(layer, rbm.weight.T, rbm.hidden_bias)
    top = maps[-1][0]
    weight = 0.1 * torch.randn(
        top.weight.shape, generator=generator, device=data.device, dtype=data.dtype
    )
    _copy(top, weight, torch.zeros_like(top.bias))


def _train_stack(
    maps: list[tuple[nn.Linear, bool]],
    data: Tensor,
    generator: torch.Generator,
    settings: RbmSettings | None,
    report: Report | None,
) -> list[Rbm]:
    """One RBM for each linear map, from the bottom; each learns from the means of the one below."""
    settings = settings or RbmSettings()
    stack = []
    for i, (layer, logistic) in enumerate(maps, start=1):
        rbm = Rbm(
            layer.in_features,
            layer.out_features,
            linear=not logistic,
            settings=settings,
            generator=generator,
            dtype=data.dtype,
        )

        def report_epoch(epoch: int, error: float, layer_number: int = i) -> None:
            if report is not None:
                report(PretrainingEpoch(layer_number, len(maps), epoch, settings.epochs, error))

        train_rbm(data, rbm, report_epoch)
        stack.append(rbm)
        data = rbm.hidden_mean(data)
    return stack


def _generator(data: Tensor, seed: int) -> torch.Generator:
    return torch.Generator(device=data.device).manual_seed(seed)


def _copy(layer: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
