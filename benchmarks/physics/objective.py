"""The loss of all terms and its gradient, which on a GPU are one CUDA graph."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.capture import captured
from krylov_descent import Term

Terms = dict[str, Term]


def loss_of(net: nn.Module, terms: Terms) -> Tensor:
    """The weighted sum of the terms, in the autograd graph."""
    rows = []
    for term in terms.values():
        batch = term.batch
        losses = term.losses(term.outputs(net, batch.inputs), batch.targets, batch.size)
        rows.append(term.weight * losses.mean())
    return torch.stack(rows).sum()


def closure_of(net: nn.Module, terms: Terms) -> Callable[[], Tensor]:
    """What optimisers of torch call: it puts the gradients into `.grad` and returns the loss."""
    parameters = list(net.parameters())
    place = parameters[0].new_empty(())
    gradients: list[Tensor] = []

    def evaluate() -> None:
        loss = loss_of(net, terms)
        gradients[:] = torch.autograd.grad(loss, parameters)
        place.copy_(loss.detach())

    run = recorded(evaluate, place.device)

    def closure() -> Tensor:
        run()
        # Each time: a recording writes to its own tensors, and a net may have two recordings.
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        return place.clone()

    return closure


def recorded(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """A function that writes to tensors which stay where they are; on a GPU as one graph."""
    return captured(function) if device.type == "cuda" else function
