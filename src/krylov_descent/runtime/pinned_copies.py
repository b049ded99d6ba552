"""Copies between a GPU and pinned memory of the host that do not hold up other work."""

import torch
from torch import Tensor


class PinnedCopies:
    """Copies to and from pinned memory, in the order in which they are asked for.

    They run beside the work of the GPU, on one stream of their own.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, vector: Tensor, row: Tensor) -> None:
        """Copy a vector of the GPU to a row in pinned memory, in the dtype of the row."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # Rounded on the GPU, so that fewer bytes travel.
            row.copy_(vector.to(row.dtype), non_blocking=True)
        vector.record_stream(self._stream)

    def fetch(self, rows: Tensor) -> Tensor:
        """Begin to copy rows [k, m] from pinned memory; `arrived` must be called before use."""
        # Row by row: a part of a row is one piece of memory, a part of many rows is not.
        with torch.cuda.stream(self._stream):
            block = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)
            for target, row in zip(block, rows, strict=True):
                target.copy_(row, non_blocking=True)
        return block

    def arrived(self, fetched: Tensor) -> Tensor:
        """What was fetched, for all work that follows."""
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._stream)
        fetched.record_stream(current)
        return fetched

    def wait(self) -> None:
        """Wait until all copies are done."""
        self._stream.synchronize()
