"""Which tensors the kernels are for, and how they lie in memory."""

import torch
from torch import Tensor


def is_ours(x: Tensor, device: torch.device) -> bool:
    """Whether it is a plain float32 tensor on this device."""
    plain = x.dtype is torch.float32 and x.layout is torch.strided
    return plain and x.device == device


def is_rows(x: Tensor, device: torch.device) -> bool:
    """Whether it is one of ours that lies in memory row by row, without gaps; no images."""
    return is_ours(x, device) and x.dim() in (2, 3) and x.shape[-1] > 1 and x.is_contiguous()


def rows_of(x: Tensor) -> Tensor:
    """The matrix [rows, columns] that such a tensor is in memory."""
    return x.view(-1, x.shape[-1])
