"""Operations whose derivatives lack something, and the nets that they are in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class BackwardOnlyTanh(torch.autograd.Function):
    """tanh with a first derivative, by a backward pass, and no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.tanh()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return gradient * (1 - y.square())


class NumpyTanh(BackwardOnlyTanh):
    """tanh whose derivative comes from NumPy: linear in the gradient, constant in x."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y = ctx.saved_tensors[0].detach().double().numpy()
        return gradient * torch.from_numpy(1 - y * y).to(gradient)


class OnceTanh(torch.autograd.Function):
    """tanh with a forward derivative and a backward pass that cannot be differentiated."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return gradient * (1 - y.square())

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return tangent * (1 - y.square())


class SoundTanh(BackwardOnlyTanh):
    """tanh with all of its derivatives."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        y: Tensor = ctx.saved_tensors[0]
        return gradient * (1 - y.square())


class StraightThrough(torch.autograd.Function):
    """Rounds, and has the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function.apply(x)


class Bag(nn.Module):
    """Mean of embeddings, by an operation with a first derivative alone, or by others."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 4)
        self.fused = fused

    def forward(self, x: Tensor) -> Any:
        return self.bag(x) if self.fused else F.embedding(x, self.bag.weight).mean(1)


class RadialBasis(nn.Module):
    """Bells around centres, whose distances come from `cdist` or from a formula."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(8, 2))
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            mode = "donot_use_mm_for_euclid_dist"  # the other one can be differentiated twice
            squares = torch.cdist(x, self.centres, compute_mode=mode).square()
        else:
            squares = (x.unsqueeze(1) - self.centres).square().sum(2)
        return torch.exp(-squares / 2)


@dataclass(frozen=True)
class Net:
    """A net with first derivatives alone, and one with the same numbers and all derivatives."""

    model: nn.Module
    twin: nn.Module
    loss: nn.Module
    data: tuple[Tensor, Tensor]


def _of(layers: Callable[[bool], list[nn.Module]], loss: nn.Module, *data: Tensor) -> Net:
    model, twin = (nn.Sequential(*layers(fused)).double() for fused in (True, False))
    twin.load_state_dict(model.state_dict())
    return Net(model, twin, loss, (data[0], data[1]))


def embedding_bag() -> Net:
    torch.manual_seed(0)
    x = torch.randint(0, 12, (40, 3))

    def layers(fused: bool) -> list[nn.Module]:
        return [Bag(fused), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)]

    return _of(layers, nn.CrossEntropyLoss(), x, x.sum(1) % 3)


def distances() -> Net:
    torch.manual_seed(0)
    x = torch.randn(40, 2, dtype=torch.float64)

    def layers(fused: bool) -> list[nn.Module]:
        return [RadialBasis(fused), nn.Linear(8, 1)]

    return _of(layers, nn.MSELoss(), x, (x[:, :1] * x[:, 1:]).sin())


def once_differentiable_function() -> Net:
    torch.manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64)

    def layers(fused: bool) -> list[nn.Module]:
        activation = Applied(BackwardOnlyTanh) if fused else nn.Tanh()
        return [nn.Linear(4, 6), activation, nn.Linear(6, 3)]

    return _of(layers, nn.CrossEntropyLoss(), x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 0))


NETS: dict[str, Callable[[], Net]] = {
    "EmbeddingBag": embedding_bag,
    "cdist": distances,
    "once_differentiable": once_differentiable_function,
}
# What the warning quotes of torch, or says itself.
NAMED = {
    "EmbeddingBag": "_embedding_bag_backward",
    "cdist": "_cdist_backward",
    "once_differentiable": "BackwardOnlyTanh",
}
