"""Refuse models whose forward pass writes parameters, or whose gradient is not that of the loss.

An objective must be a function of its parameters, and a step that fails must restore them. Neither
is possible if a forward pass writes parameters, as an embedding with `max_norm` does. The gradient
of an embedding with `scale_grad_by_freq` is divided by how often a row is used in a batch, so it is
not the gradient of any function.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from krylov_descent.objective.layers.graph_walks import edges
from krylov_descent.objective.losses import LossContractError
from krylov_descent.runtime.private import scales_by_frequency, writes_of

EMBEDDINGS = nn.Embedding | nn.EmbeddingBag


def check_embeddings(model: nn.Module) -> None:
    """Refuse embeddings with `max_norm` or `scale_grad_by_freq`, before any forward pass.

    Raises:
        LossContractError: the model has such an embedding; the message names it.
    """
    for name, module in model.named_modules():
        if not isinstance(module, EMBEDDINGS):
            continue
        described = f"{name or 'model'} ({type(module).__name__})"
        if module.max_norm is not None:
            raise LossContractError(
                f"{described} has max_norm={module.max_norm}, with which a forward pass writes "
                "parameters: make it with max_norm=None, and bound its rows with weight_decay"
            )
        if module.scale_grad_by_freq and module.weight.requires_grad:
            raise LossContractError(
                f"{described} has scale_grad_by_freq=True, so its gradient is not that of the "
                "loss: make it with scale_grad_by_freq=False, or freeze it by requires_grad_(False)"
            )


def check_graph(losses: Tensor) -> None:
    """Refuse calls of `functional.embedding` with `scale_grad_by_freq`, which no module shows.

    Raises:
        LossContractError: the graph of the losses has such a call.
    """
    for _, node in edges([losses]):
        if scales_by_frequency(node):
            raise LossContractError(
                "the forward pass has an embedding with scale_grad_by_freq=True, so its gradient "
                "is not that of the loss: call it with scale_grad_by_freq=False"
            )


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Context manager that refuses writes to parameters, and restores the parameters bit for bit.

    It yields a function that checks for writes so far. Leaving the context checks, too.

    Raises:
        LossContractError: a parameter was written, even if only with the values it had.

    Memory: a copy of all parameters inside the context.
    """
    before = [(n, p, p.detach().clone(), writes_of(p)) for n, p in model.named_parameters()]

    def written() -> list[tuple[str, Tensor, Tensor]]:
        return [
            (name, p, copy)
            for name, p, copy, writes in before
            # Values are compared, too, because the version counter misses writes through `.data`.
            if writes_of(p) != writes or not _has_numbers_of(p, copy)
        ]

    def check() -> None:
        for name, _, _ in written():
            raise LossContractError(
                f"the forward pass writes the parameter {name}, so the loss is no function of the "
                "parameters: leave out max_norm of embeddings and other writes to parameters"
            )

    try:
        yield check
        check()
    finally:
        with torch.no_grad():
            for _, p, copy in written():
                p.copy_(copy)


def _has_numbers_of(tensor: Tensor, other: Tensor) -> bool:
    return bool(((tensor == other) | (tensor.isnan() & other.isnan())).all())
