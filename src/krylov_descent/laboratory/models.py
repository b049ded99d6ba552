"""The paper's networks: logistic hidden layers, linear outputs.

The output nonlinearity (logistic for autoencoders, softmax for classifiers) belongs to the loss:
that makes the Gauss-Newton matrix positive semidefinite and the loss exact for large outputs.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

Code = Literal["linear", "logistic"]


def autoencoder(
    sizes: Sequence[int],
    code: Code = "linear",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """An encoder of the given sizes and its mirror image, untied: [n, sizes[0]] to logits of it.

    Args:
        sizes: from the input to the code, such as (784, 400, 200, 100, 50, 25, 5).
        code: whether the code layer is linear, as in the paper, or logistic like the others.
        device: of the parameters.
        dtype: of the parameters.
    """
    _check(sizes)
    if code not in ("linear", "logistic"):
        raise ValueError(f"`code` must be 'linear' or 'logistic', found {code!r}")
    mirrored = [*sizes, *reversed(sizes[:-1])]
    linear_layers = {len(mirrored) - 1}
    if code == "linear":
        linear_layers.add(len(sizes) - 1)
    return _layers(mirrored, linear_layers, device, dtype)


def classifier(
    sizes: Sequence[int],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """A network of the given sizes, [n, sizes[0]] to [n, sizes[-1]] logits of the classes."""
    _check(sizes)
    return _layers(sizes, {len(sizes) - 1}, device, dtype)


def linear_layers(model: nn.Sequential) -> list[tuple[nn.Linear, bool]]:
    """The linear maps of such a network, each with whether logistic units follow it."""
    modules = list(model)
    following = [*modules[1:], None]
    return [
        (module, isinstance(after, nn.Sigmoid))
        for module, after in zip(modules, following, strict=True)
        if isinstance(module, nn.Linear)
    ]


def _layers(
    sizes: Sequence[int],
    linear: set[int],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Sequential:
    """Linear maps between the sizes; layer i has logistic units unless i is in `linear`."""
    modules: list[nn.Module] = []
    for i in range(1, len(sizes)):
        modules.append(nn.Linear(sizes[i - 1], sizes[i], device=device, dtype=dtype))
        if i not in linear:
            modules.append(nn.Sigmoid())
    return nn.Sequential(*modules)


def _check(sizes: Sequence[int]) -> None:
    if len(sizes) < 2 or min(sizes) < 1:
        raise ValueError(f"`sizes` needs two or more positive layer sizes, found {tuple(sizes)}")
