"""A small net with data, and the check that a step changed nothing at all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from krylov_descent import KSD


def network() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def samples(count: int = 20) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.randn(count, 4), torch.randn(count, 2)


@contextmanager
def unchanged(optimizer: KSD) -> Iterator[None]:
    """Parameters, gradients and the state of the optimiser are bit for bit as before."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]

    def snapshot() -> list[Tensor]:
        kept = [kept for state in optimizer.state.values() for kept in state.values()]
        return [t.detach().clone().view(torch.uint8) for t in (*tensors, *kept) if t.dim()]

    before = snapshot()
    yield
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    assert all(p.grad is None for p in tensors)
