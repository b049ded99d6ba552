"""Narrow layers one after another, by one kernel: functions of products of functions of products.

A layer of 25 units has hardly anything to compute, and takes as long as a kernel takes at least.
So what is made of narrow products is not made at once. If the next thing made of it is a narrow
product again, and something of that, it is a chain; else a chain with one stage.

A sample needs no other one on its way, so each program takes a few of them through all stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from krylov_descent.cuda.triton import chain_kernels, kernels
from krylov_descent.cuda.triton import split_fp16 as halves
from krylov_descent.cuda.triton.chain_kernels import ADDED, APPLIED, COLUMN, STAGES, TERM, UNIT
from krylov_descent.cuda.triton.launching import launch, or_else
from krylov_descent.cuda.triton.matrix_cache import Knowledge, memory_of
from krylov_descent.cuda.triton.split_fp16 import Function, Halves, Planned, Product, pointers

# Rows, columns and warps of a program; with 2 it fetches weights for the next stage beforehand.
ROWS, WIDTH, WARPS, AHEAD = 16, 128, 8, 2
# Columns and terms of a stage at most; with 0 there are no chains.
WIDEST = WIDTH
# With more rows than this, kernels for single stages have the whole GPU to do.
MOST_ROWS = 4096
# Where a piece of memory begins is counted in int32, times `UNIT`.
FARTHEST = 1 << 26

BOUNDED_BY_ONE = (kernels.SIGMOID, kernels.TANH)
NOTHING = Function(kernels.NOTHING)

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Stage:
    """A function of a product.

    Attributes:
        product: with a that is halves, or the stage before.
        function: of it, or `NOTHING`.
        out: for its values [M, N], without gaps, and out of the graph.
        bound: of them [1], one of `Bounds`; zero at first, or what they cannot exceed.
    """

    product: Product
    function: Function
    out: Tensor
    bound: Tensor

    @property
    def applied(self) -> bool:
        """Whether there is a function."""
        return self.function.kind != kernels.NOTHING

    @property
    def in_one(self) -> bool:
        """Whether its values are up to one."""
        return self.function.kind in BOUNDED_BY_ONE

    @property
    def goes_forward(self) -> bool:
        """Whether a bias is what may be added, and not a matrix."""
        return self.in_one or self.product.bias is not None

    def goes_with(self, other: "Stage") -> bool:
        """Whether one kernel is for both."""
        a, b = self.product, other.product
        alike = (a.b_along, a.three, self.goes_forward) == (b.b_along, b.three, other.goes_forward)
        same = _formula(self.function) == _formula(other.function)
        return alike and (same or not (self.applied and other.applied))


class Chain:
    """Stages that are not made yet, each with the one before it as a.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stages: list[Stage] = []
        self._memories: set[int | None] = set()
        self._stream: torch.cuda.Stream | None = None

    def __bool__(self) -> bool:
        return bool(self._stages)

    def holds(self, number: int) -> bool:
        """Whether a stage is to be written to this memory."""
        return number in self._memories

    def ends_with(self, matrix: Tensor) -> Stage | None:
        """The last stage, if this is all of it."""
        last = self._stages[-1] if self._stages else None
        if last is None or memory_of(matrix) != memory_of(last.out):
            return None
        return last if matrix.shape == last.out.shape and matrix.is_contiguous() else None

    def takes(self, stage: Stage) -> bool:
        """Whether it can go on with this."""
        if not self._stages or len(self._stages) == STAGES:
            return False
        last, a = self._stages[-1], stage.product.a
        if not isinstance(a, Planned) or a.matrix is not last.out:
            return False
        here = torch.cuda.current_stream(self._device) == self._stream
        return here and all(stage.goes_with(other) for other in self._stages)

    def append(self, stage: Stage) -> None:
        """Go on with a stage, or begin."""
        if not self._stages:
            self._stream = torch.cuda.current_stream(self._device)
        self._stages.append(stage)
        self._memories.add(memory_of(stage.out))

    def make(self, known: Knowledge) -> None:
        """Make all stages, on the stream where they belong, and note what is known of them."""
        stages, self._stages = self._stages, []
        self._memories.clear()
        if not stages:
            return
        here = torch.cuda.current_stream(self._device)
        if here == self._stream:
            _make(stages, known)
            return
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            _make(stages, known)
        here.wait_stream(self._stream)


def _make(stages: Sequence[Stage], known: Knowledge) -> None:
    first = stages[0]
    if len(stages) == 1 and first.applied:
        # The kernel for a single one knows a scale for all of its halves.
        bound = None if first.in_one else first.bound
        found = halves.function_of_product(first.product, first.function, first.out, bound)
        known.remember(first.out, halves=replace(found, bound=first.bound), bound=first.bound)
        return
    for stage, of_stage in zip(stages, make_stages(stages), strict=True):
        known.remember(stage.out, halves=of_stage, bound=stage.bound)


def is_narrow(m: int, n: int, k: int) -> bool:
    """Whether a product of these sizes may be in a chain."""
    return max(n, k) <= WIDEST and m <= MOST_ROWS


def may_be_stage(product: Product, function: Function) -> bool:
    """Whether the kernel is for these."""
    added, bias, y = product.added, product.bias, function.y
    fits = product.a_along and is_narrow(*product.sizes) and (added is None or bias is None)
    even = y is None or y.data_ptr() % UNIT == 0
    return fits and even and all(_begins_within(x) for x in (added, bias) if x is not None)


def make_stages(stages: Sequence[Stage]) -> list[Halves | None]:
    """Launch the kernel for a chain; returns the halves of those stages that have some."""
    first = stages[0]
    a, _ = first.product.halves
    found = [_room_for(stage) if stage.in_one else None for stage in stages]
    written = [of_stage or a for of_stage in found]
    m, _, _ = first.product.sizes
    applied = next((stage for stage in stages if stage.applied), first)
    kind = kernels.SIGMOID if first.goes_forward else kernels.MULTIPLE
    kind = applied.function.kind if applied.applied else kind

    def each(part: Callable[[Stage], Item]) -> tuple[Item, ...]:
        return _filled_up([part(stage) for stage in stages])

    args = (
        *pointers(a),
        a.unscale,
        each(lambda stage: pointers(stage.product.b)[0]),
        each(lambda stage: pointers(stage.product.b)[1]),
        each(lambda stage: stage.product.b.unscale),
        each(lambda stage: _whole_memory(_added(stage))),
        each(lambda stage: UNIT * _added(stage).storage_offset()),
        each(lambda stage: or_else(stage.function.y, stage.out)),
        each(lambda stage: stage.out),
        _filled_up([pointers(of_stage)[0] for of_stage in written]),
        _filled_up([pointers(of_stage)[1] for of_stage in written]),
        _filled_up([of_stage.unscale for of_stage in written]),
        _whole_memory(first.bound),
        each(lambda stage: UNIT * stage.bound.storage_offset()),
        each(_form),
        len(stages),
        m,
        *applied.function.multiple,
        int(applied.function.if_positive),
    )
    constants = kind, first.product.b_along, first.product.three, ROWS, WIDTH
    grid = -(-m // ROWS), 1
    launch(chain_kernels.chain, grid, args, constants, num_warps=WARPS, num_stages=AHEAD)
    return found


def _filled_up(parts: list[Item]) -> tuple[Item, ...]:
    """With the last one, to what the kernel takes."""
    return (*parts, *parts[-1:] * (STAGES - len(parts)))


def _room_for(stage: Stage) -> Halves:
    rows, columns = stage.out.shape
    three = stage.product.three
    return halves.empty_halves(stage.out, rows, columns, three=three, bound=stage.bound)


def _added(stage: Stage) -> Tensor:
    """A bias, or a matrix; or any that is not looked at."""
    return or_else(stage.product.bias, or_else(stage.product.added, stage.out))


def _form(stage: Stage) -> int:
    _, n, k = stage.product.sizes
    adds = stage.product.bias is not None or stage.product.added is not None
    return UNIT * (TERM * k + COLUMN * n + ADDED * adds + APPLIED * stage.applied)


def _formula(function: Function) -> tuple[int, tuple[float, float, float], bool]:
    return function.kind, function.multiple, function.if_positive


def _whole_memory(x: Tensor) -> Tensor:
    """All that it is a part of, from the beginning."""
    return x.detach().as_strided((1,), (1,), 0)


def _begins_within(x: Tensor) -> bool:
    """Whether it is not too far behind the beginning of its memory, and that begins evenly."""
    return x.storage_offset() < FARTHEST and _whole_memory(x).data_ptr() % UNIT == 0
