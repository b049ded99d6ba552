"""A multilayer perceptron that starts as scikit-learn's does, and is trained by KSD."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from krylov_descent.optimizers.ksd.ksd import KSD
from krylov_descent.optimizers.result import Status
from krylov_descent.optimizers.true_end import truly_ended

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "logistic": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
}


def make_perceptron(
    sizes: list[int], activation: str, random: np.random.RandomState, dtype: torch.dtype
) -> nn.Sequential:
    """A net with Glorot's weights and biases, drawn in the order of scikit-learn's MLPs.

    Args:
        sizes: of the layers, from the inputs to the outputs.
        activation: of the hidden layers, one of `ACTIVATIONS`; the outputs have none.
        random: what the weights are drawn from.
        dtype: of the parameters.
    """
    factor = 2.0 if activation == "logistic" else 6.0
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        bound = (factor / (fan_in + fan_out)) ** 0.5
        # Without the start of nn.Linear, which draws from torch's global generator.
        layer = nn.utils.skip_init(nn.Linear, fan_in, fan_out, dtype=dtype)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor(random.uniform(-bound, bound, (fan_in, fan_out)).T))
            layer.bias.copy_(torch.tensor(random.uniform(-bound, bound, fan_out)))
        layers += [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])


def train(
    net: nn.Sequential,
    loss: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    decay: float,
    preconditioner: str,
    seed: int,
) -> Iterator[tuple[float, bool, bool]]:
    """Train without end, a step of KSD at a time.

    Args:
        net: from `make_perceptron`.
        loss: one of torch's.
        data: inputs [n, d] and targets.
        decay: λ of the L2 term ½λ‖W‖², which biases have no part in.
        preconditioner: of KSD.
        seed: of KSD.

    Yields:
        The objective after each step; whether the step was made with all of the data, or could not
        be made; and whether only rounding is left to gain.

    Raises:
        ValueError: the loss of the net as it starts is not finite.
    """
    layers = [layer for layer in net if isinstance(layer, nn.Linear)]
    groups = [
        {"params": [layer.weight for layer in layers], "weight_decay": decay},
        {"params": [layer.bias for layer in layers]},
    ]
    optimizer = KSD(net, loss, groups, preconditioner=preconditioner, seed=seed)
    first = None
    while True:
        result = optimizer.step(data)
        sets = min(result.curvature_samples, result.objective_samples)
        on_all = sets == result.samples or result.status is Status.NOT_FINITE
        if first is None:
            first = result.loss
            if result.status is Status.NOT_FINITE:
                raise ValueError(f"training cannot begin, scale `X` and `y`: {result.reason}")
        at_end = result.status is Status.STATIONARY or truly_ended(result, first, data[0].dtype)
        yield optimizer.objective.value(data), on_all, at_end
