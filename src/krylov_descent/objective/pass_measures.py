"""How much memory the passes of a model take, and in which precision they compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from krylov_descent.objective.batches import Batch
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import is_out_of_memory
from krylov_descent.runtime.private import DispatchMode


def activation_bytes(network: Network, few: Batch) -> float:
    """Bytes of activations that a backward pass keeps per sample, at least 1."""

    def kept(batch: Batch) -> int:
        return kept_bytes(lambda: network.sample_losses(batch), network.parameters.tensors)

    if few.size == 1:
        return max(1.0, float(kept(few)))
    half = few.rows(0, few.size // 2)
    return max(1.0, (kept(few) - kept(half)) / (few.size - half.size))


def kept_bytes(function: Callable[[], Any], parameters: list[Tensor]) -> int:
    """Bytes that autograd saves in `function()`, without parameters, plus those of its result."""
    try:
        with _SavedBytes(parameters) as saved:
            result = function()
        return saved.bytes + (result.nbytes if isinstance(result, Tensor) else 0)
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        # Hooks on saved tensors fail if the forward pass uses transforms of torch.func. The bytes
        # of all computed tensors are an upper bound.
        made = _ResultBytes()
        with made:
            function()
        return made.bytes


class _ResultBytes(DispatchMode):
    """Dispatch mode that counts the bytes of all results of operations, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.bytes += sum(tensor.nbytes for tensor in _tensors_of(result))
        return result


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that autograd saves: each storage once, parameters not at all."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self._sizes: dict[int, int] = {}
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        super().__init__(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "_SavedBytes":  # type: ignore[override]
        super().__enter__()
        return self

    @property
    def bytes(self) -> int:
        """Bytes saved so far."""
        return sum(self._sizes.values())

    def _pack(self, tensor: Tensor) -> Tensor:
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except RuntimeError:
            # Inside transforms of torch.func a tensor has no storage: count each tensor.
            address, size = -len(self._sizes) - 1, tensor.nbytes
        if address not in self._parameters:
            self._sizes[address] = size
        return tensor


class CoarsestArithmetic(DispatchMode):
    """Dispatch mode that finds the floating-point dtype with the fewest digits in any result."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.coarsest = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors_of(result):
            if (
                tensor.is_floating_point()
                and torch.finfo(tensor.dtype).eps > torch.finfo(self.coarsest).eps
            ):
                self.coarsest = tensor.dtype
        return result


def _tensors_of(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [t for t in result if isinstance(t, Tensor)] if isinstance(result, tuple | list) else []
