"""Random vectors and symmetric matrices of given eigenvalues, in float64."""

import torch
from torch import Tensor


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def eigenbasis(n: int, seed: int) -> Tensor:
    q: Tensor = torch.linalg.qr(numbers(n, n, seed=seed)).Q
    return q


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A dense symmetric matrix of these eigenvalues in a random eigenbasis."""
    q = eigenbasis(len(eigenvalues), seed)
    return (q * eigenvalues.double()) @ q.t()
