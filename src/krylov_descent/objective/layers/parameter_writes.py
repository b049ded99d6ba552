"""Models whose forward pass writes parameters, or whose gradient is none.

An objective is a function of its parameters, and a step that fails leaves them as they were. Both
are impossible where a forward pass writes them, as an embedding with `max_norm` does. The gradient
of an embedding with `scale_grad_by_freq` is divided by how often a row is used in a batch: it is
the gradient of no function.
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
        LossContractError: there is one; the message names it.
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
    """Refuse functions that are called with `scale_grad_by_freq`, where no module has it.

    Raises:
        LossContractError: there is one in the graph of the losses.
    """
    for _, node in edges([losses]):
        if scales_by_frequency(node):
            raise LossContractError(
                "the forward pass has an embedding with scale_grad_by_freq=True, so its gradient "
                "is not that of the loss: call it with scale_grad_by_freq=False"
            )


@contextmanager
def parameters_kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Refuse forward passes that write parameters, and put those back bit for bit.

    Gives a function that checks for writes so far; the end of the while checks, too.

    Raises:
        LossContractError: a parameter was written, if only with the numbers it had.

    Memory: a copy of all parameters for the while.
    """
    before = [(n, p, p.detach().clone(), writes_of(p)) for n, p in model.named_parameters()]

    def written() -> list[tuple[str, Tensor, Tensor]]:
        return [
            (name, p, copy)
            for name, p, copy, writes in before
            # Numbers, too: what is written through `.data` is not counted.
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
