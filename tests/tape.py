"""A recorder of tensor operations on the CPU that behaves as a CUDA graph does.

`Tape.record(function)` runs the function once and keeps every ATen operation that it makes, forward
and backward, below autograd, autocast and `torch.func`. `Tape.replay` makes the same operations
again on the same memory. So code that records and replays can be tested without a GPU:

- Recording has no effect that is seen from outside: tensors that were there before, and the random
  generators, are as they were. Floating-point numbers of the result are NaN until the first replay.
- A replay reads its inputs where they were when they were recorded, and overwrites its results in
  place. A Python number that the function read is still the number of the recording.
- A replay leaves version counters and autograd alone: a graph that was built while recording can be
  walked after a replay, and then finds the numbers of that replay in its saved tensors.
- What would make the host wait for a GPU, or a shape depend on numbers, raises `RuntimeError`.
- A replay while another tape records becomes a part of that recording, as a child graph does.

- Only the memory that was allocated while recording is kept alive. A replay that reads other memory
  after it was freed raises `RuntimeError`, where a GPU would read whatever is there.

Unlike a CUDA graph a tape keeps the memory of all intermediate results. And the host's memory is
the device's: nothing tells a copy to the host that is waited for from one that is not.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from krylov_descent.runtime.private import storage_at

Result = TypeVar("Result")

aten = torch.ops.aten

# Methods that hand numbers to Python without an ATen operation.
HOST_READS = ("numpy", "tolist", "__array__", "__dlpack__")
# Operations that read numbers on the host, and are not tagged so.
UNTAGGED_HOST_READS = (aten.is_nonzero, aten._linalg_check_errors)
# Operations that allocate memory and write nothing to it: a CUDA graph has no node for them.
ALLOCATIONS = (
    aten.empty,
    aten.empty_like,
    aten.empty_permuted,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)


class Tape(Generic[Result]):
    """Operations to make again.

    Attributes:
        result: what the function returned; every replay overwrites its tensors in place.
    """

    def __init__(self, result: Result, operations: "list[_Operation]") -> None:
        self.result = result
        self._operations = operations

    @classmethod
    def record(cls, function: Callable[[], Result]) -> "Tape[Result]":
        """Record a function of no arguments, which is run once.

        Raises:
            RuntimeError: the function reads numbers on the host, makes a tensor whose shape depends
                on numbers, or records a tape itself.
        """
        if any(isinstance(mode, _Recorder) for mode in _get_current_dispatch_mode_stack()):
            raise RuntimeError("a tape cannot be recorded while another one is being recorded")
        recorder = _Recorder()
        try:
            # Patched: a mode that sees methods of tensors is off within backward passes.
            with patch.multiple(Tensor, **recorder.refusals()), recorder:
                result = function()
        finally:
            recorder.undo()
        recorder.check()
        return cls(result, recorder.operations)

    @torch.inference_mode()  # tensors that were made in this mode can be written to in no other
    def replay(self) -> None:
        """Make all operations again; the tensors of the recording get their new numbers."""
        with torch.autocast("cpu", enabled=False):
            for operation in self._operations:
                operation.run()


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation on aliases of the tensors it was recorded with.

    Attributes:
        function: the operation.
        args: of it.
        kwargs: likewise.
        made: its outputs in order, with None for those that are no new memory.
        grad_mode: at which some operations look: an LSTM keeps what its backward pass needs.
    """

    function: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[Tensor | None]
    grad_mode: bool

    def run(self) -> None:
        """Make it again."""
        args, kwargs = _there(self.args), _there(self.kwargs)
        with torch.set_grad_enabled(self.grad_mode):  # no graph is built: no argument requires one
            found = self.function(*args, **kwargs)
        for target, source in zip(self.made, _tensors(found), strict=True):
            if target is None:
                continue
            if (target.shape, target.dtype) != (source.shape, source.dtype):
                raise RuntimeError(
                    f"{self.function} gave {list(source.shape)} in {source.dtype}, and was recorded"
                    f" with {list(target.shape)} in {target.dtype}"
                )
            target.copy_(source)


class _Recorder(TorchDispatchMode):
    """Keeps operations, and how to undo them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._refused: str | None = None
        self._made: dict[int, Tensor] = {}  # by address of the storage, which it keeps alive
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # bytes that were there, and a copy
        default = torch.default_generator
        self._generators = {default: default.get_state()}

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.check()
        if (reason := _why_refused(func, args, kwargs)) is not None:
            self.refuse(reason)
        given = list(_tensors((args, kwargs)))
        self._note(given, kwargs.get("generator"))
        # Aliases without version counter and graph, taken before an operation that replaces memory.
        operation_args, operation_kwargs = self._aliases(args), self._aliases(kwargs)
        found = func(*args, **kwargs)
        if func is aten.lift_fresh.default:  # a constant from Python, which may be written to later
            operation_args, given = tuple(tensor.clone() for tensor in given), []
        there = {_place(tensor) for tensor in given}
        made = [
            None if _place(t) in there or t._is_zerotensor() else t.data for t in _tensors(found)
        ]
        self._made.update((_place(tensor), tensor) for tensor in made if tensor is not None)
        is_run = func._schema.is_mutable or any(tensor is not None for tensor in made)
        if is_run and func.overloadpacket not in ALLOCATIONS:
            grad_mode = torch.is_grad_enabled()
            self.operations.append(
                _Operation(func, operation_args, operation_kwargs, made, grad_mode)
            )
        return found

    def _aliases(self, nest: Any) -> Any:
        """Arguments of an operation, with tensors on the same memory in place of its tensors."""

        def alias(tensor: Tensor) -> Any:
            strided = tensor.layout is torch.strided and _place(tensor) and not tensor.is_conj()
            outside = strided and _place(tensor) not in self._made
            return _Outside.of(tensor) if outside else tensor.data

        return _mapped(nest, Tensor, alias)

    def refusals(self) -> dict[str, Any]:
        """For each method of tensors that reads numbers past all dispatch: one that refuses to."""
        reasons = {name: f"Tensor.{name} reads numbers on the host" for name in HOST_READS}
        return {name: partial(self.refuse, reason) for name, reason in reasons.items()}

    def refuse(self, reason: str, *_: Any, **__: Any) -> None:
        """End the recording: the function may catch the error, but nothing more is recorded."""
        self._refused = reason
        self.check()

    def check(self) -> None:
        """Raise if the recording was ended."""
        if self._refused is not None:
            raise RuntimeError(f"{self._refused} while recording")

    def undo(self) -> None:
        """Give what was there before its numbers again; make what is new NaN."""
        with torch.inference_mode():
            for tensor in self._made.values():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(torch.nan)
            for memory, copy in self._before.values():
                memory.copy_(copy)
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _note(self, given: list[Tensor], generator: torch.Generator | None) -> None:
        """Copy the memory of tensors that are seen for the first time, and were there before."""
        if generator is not None:
            self._generators.setdefault(generator, generator.get_state())
        for tensor in given:
            place = _place(tensor)
            if place and place not in self._made and place not in self._before:
                memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self._before[place] = memory, memory.clone()


def _why_refused(
    function: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why a GPU would have to be waited for, for its numbers or for a shape; else None."""
    packet = function.overloadpacket
    if torch.Tag.data_dependent_output in function.tags or packet in UNTAGGED_HOST_READS:
        return f"{function.name()} reads numbers on the host"
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        # By indices the shape is known; a mask is made into indices by `nonzero`.
        masked = any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1]))
        # Except for one number that is written to where the mask is.
        dynamic = masked and (packet is aten.index or args[2].numel() > 1)
    elif packet is aten.repeat_interleave:
        dynamic = kwargs.get("output_size") is None
    else:
        dynamic = torch.Tag.dynamic_output_shape in function.tags
    return f"{function.name()} makes a shape depend on numbers" if dynamic else None


def _place(tensor: Tensor) -> int:
    """The address of its storage; 0 for one without memory."""
    return 0 if tensor._is_zerotensor() else tensor.untyped_storage().data_ptr()


def _tensors(nest: Any) -> Iterator[Tensor]:
    """The tensors in arguments or outputs of an operation, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, dict):
        yield from _tensors(list(nest.values()))
    elif isinstance(nest, list | tuple):
        for part in nest:
            yield from _tensors(part)


@dataclass(frozen=True, slots=True)
class _Outside:
    """A tensor that was there before the recording, and may be freed."""

    storage: StorageWeakRef
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Outside":
        storage = StorageWeakRef(tensor.untyped_storage())
        offset = int(tensor.storage_offset())
        return cls(storage, tensor.dtype, offset, tensor.shape, tensor.stride())

    def tensor(self) -> Tensor:
        if self.storage.expired():
            raise RuntimeError("a replay reads memory that was freed after the recording")
        empty = torch.empty(0, dtype=self.dtype)
        return empty.set_(storage_at(self.storage), self.offset, self.shape, self.stride)


def _mapped(nest: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Arguments of an operation, with a function of each object of a class in its place."""
    if isinstance(nest, kind):
        return function(nest)
    if isinstance(nest, dict):
        return {name: _mapped(part, kind, function) for name, part in nest.items()}
    if isinstance(nest, list | tuple):
        parts = [_mapped(part, kind, function) for part in nest]
        return parts if isinstance(nest, list) else tuple(parts)
    return nest


def _there(nest: Any) -> Any:
    """Arguments of an operation, with tensors in place of what stands for them."""
    return _mapped(nest, _Outside, _Outside.tensor)
