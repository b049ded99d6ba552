"""Starting weights by name, the same for a seed whatever the device and the precision.

All are drawn on the CPU in float64 from a generator of their own and then rounded and moved:
a run on the GPU, or in float32, starts from the same point as one on the CPU or in float64, and
the global random state is neither read nor changed.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from krylov_descent.laboratory.choices import unknown_name

INCOMING = 15

# (outputs, inputs, generator) -> weight [outputs, inputs], bias [outputs]
Draw = Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]


def sparse(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Martens 2010: 15 incoming weights per unit from N(0, 1), the others and the biases 0.

    The units' total input then does not grow with the layer, and units differ from each other.
    """
    count = min(INCOMING, inputs)
    ranks = torch.rand(outputs, inputs, generator=generator, dtype=torch.float64)
    chosen = ranks.argsort(dim=1)[:, :count]
    values = torch.randn(outputs, count, generator=generator, dtype=torch.float64)
    weight = torch.zeros(outputs, inputs, dtype=torch.float64).scatter_(1, chosen, values)
    return weight, torch.zeros(outputs, dtype=torch.float64)


def glorot(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Glorot & Bengio 2010: weights U(-a, a) with a = √(6/(inputs + outputs)), biases 0."""
    weight = _uniform((outputs, inputs), math.sqrt(6 / (inputs + outputs)), generator)
    return weight, torch.zeros(outputs, dtype=torch.float64)


def torch_default(outputs: int, inputs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What `nn.Linear` starts with: weights and biases U(-a, a) with a = 1/√inputs."""
    bound = 1 / math.sqrt(inputs)
    weight = _uniform((outputs, inputs), bound, generator)
    return weight, _uniform((outputs,), bound, generator)


INITIALIZATIONS: dict[str, Draw] = {"sparse": sparse, "glorot": glorot, "torch": torch_default}


@torch.no_grad()
def initialize(model: nn.Module, name: str, seed: int) -> None:
    """Set every linear layer of the model, in the order of `model.modules()`.

    Args:
        model: changed in place; layers of other kinds are left alone.
        name: "sparse", "glorot" or "torch".
        seed: the same seed gives the same weights.
    """
    if name not in INITIALIZATIONS:
        raise unknown_name("initialisation", name, INITIALIZATIONS)
    draw = INITIALIZATIONS[name]
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight, bias = draw(module.out_features, module.in_features, generator)
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.copy_(bias)


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1) * bound
