"""Asynchronous copies between a GPU and pinned host memory."""

import torch
from torch import Tensor


class PinnedCopies:
    """Copies on a CUDA stream of their own, in the order of the calls, beside the GPU's other work.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, vector: Tensor, row: Tensor) -> None:
        """Copy a GPU vector to a row in pinned memory, converted to the dtype of the row."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Convert on the GPU, so that fewer bytes are transferred.
            row.copy_(vector.to(row.dtype), non_blocking=True)
        vector.record_stream(self._stream)

    def fetch(self, rows: Tensor) -> Tensor:
        """Start copying rows [k, m] to the GPU; call `arrived` before using the result."""
        # Row by row: a slice of one row is contiguous, a slice of several rows is not.
        with torch.cuda.stream(self._stream):
            block = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
            for target, row in zip(block, rows, strict=True):
                target.copy_(row, non_blocking=True)
        return block

    def arrived(self, fetched: Tensor) -> Tensor:
        """Make the current stream wait for the fetched rows, and return them."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        fetched.record_stream(current)
        return fetched

    def wait(self) -> None:
        """Wait until all copies are done."""
        self._stream.synchronize()
