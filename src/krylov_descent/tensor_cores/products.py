"""Products of float32 matrices that run on tensor cores, wherever in a forward or backward pass.

While a part of a step is recorded, every operation on tensors passes by here. What a recording
holds are kernels, so it costs nothing afterwards that they were chosen in Python.

A product needs both matrices as `Halves`. These are made once for a matrix that is used several
times (a weight going forward and back, an input for values and for weight gradients), and by the
kernel that computes the matrix, where it is one of those that are known: sigmoid and its like.

A product waits until it is known what is made of it. If that is a sum or such a function, one
kernel makes everything, and the product itself is never written; for narrow layers one kernel for
several of them. Whatever else looks at it has it made first (`pending`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from krylov_descent.precision import SETTINGS, derivative_precision, forward_precision
from krylov_descent.tensor_cores import (
    basis_vectors,
    chains,
    entropies,
    halves,
    kernels,
    vectors,
)
from krylov_descent.tensor_cores.chains import BOUNDED_BY_ONE
from krylov_descent.tensor_cores.entropies import Delta
from krylov_descent.tensor_cores.halves import Function, Halves, Product
from krylov_descent.tensor_cores.knowledge import Bounds, Knowledge
from krylov_descent.tensor_cores.pending import Pending
from krylov_descent.tensor_cores.vectors import Sum

aten = torch.ops.aten
PLAIN = {Tensor, torch.nn.Parameter}
# Fewer multiplications than this are as fast elsewhere; longer sums are none of a layer's (all
# inner products between the rows of a basis, say).
LEAST_WORK, LONGEST_SUM = 1 << 15, 1 << 17
# The same where each product has to make its halves by itself, which takes up to four kernels.
LEAST_WORK_ALONE = 1 << 27
LEAST_NUMBERS = 1 << 12
# A combination of a few rows, each of so many numbers at least, is one of a basis.
LEAST_COLUMNS = 1 << 16

# Of the operations that are ours, those that want all their arguments made.
LOOKING = {
    aten.mm.out,
    aten.addmv.default,
    aten.addmv_.default,
}
FUNCTIONS: dict[Any, int] = {
    aten.sigmoid.default: kernels.SIGMOID,
    aten.tanh.default: kernels.TANH,
    aten.relu.default: kernels.RELU,
    aten.sigmoid_backward.default: kernels.SIGMOID_BACKWARD,
    aten.tanh_backward.default: kernels.TANH_BACKWARD,
    aten.threshold_backward.default: kernels.RELU_BACKWARD,
}
BACKWARD = (kernels.SIGMOID_BACKWARD, kernels.TANH_BACKWARD, kernels.RELU_BACKWARD)
# Those that have a bound before their argument, a product, is known.
OF_PRODUCTS = {
    kernels.SIGMOID: Function(kernels.SIGMOID),
    kernels.TANH: Function(kernels.TANH),
    kernels.SIGMOID_BACKWARD: Function(kernels.MULTIPLE, multiple=(0.0, 1.0, -1.0), steepest=0.25),
    kernels.TANH_BACKWARD: Function(kernels.MULTIPLE, multiple=(1.0, 0.0, -1.0)),
    kernels.RELU_BACKWARD: Function(kernels.MULTIPLE, multiple=(1.0, 0.0, 0.0), if_positive=True),
}


class TensorCoreProducts(TorchDispatchMode):
    """For a while, products of float32 matrices on this device are made of products in fp16.

    Of three, with the digits of float32, or of one where torch is told to have tf32; but not where
    it is told to follow IEEE.

    Args:
        device: the GPU.
        before: what was recorded before this, and is always replayed before it.
        sparing: of large products alone, and without other functions: for a model with functions
            between its layers that are not known here.
    """

    def __init__(
        self,
        device: torch.device,
        before: "TensorCoreProducts | None" = None,
        *,
        sparing: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self.sparing = device, sparing
        earlier: Knowledge | None = None if before is None else before._known
        self._known: Knowledge = Knowledge(device, earlier)
        self._bounds = Bounds(device)
        self._one = self._bounds.one
        self._pending = Pending(device, self._known, self._bounds)
        self._ours: dict[Any, Callable[..., Any]] = {
            aten.mm.default: self._mm,
            aten.mm.out: self._mm_out,
            aten.addmm.default: self._addmm,
            aten.mv.default: self._mv,
            aten.addmv.default: self._addmv,
            aten.addmv_.default: self._addmv_,
        }
        if not sparing:
            self._ours |= {
                aten.add.Tensor: self._add,
                aten.mul.Tensor: self._mul,
            }
            for function, kind in FUNCTIONS.items():
                self._ours[function] = partial(self._function, function, kind)
        self._may_wait = self._ours.keys() - LOOKING

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to keep the compiler out of this it would be loaded, which takes a second

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        try:
            if problem is None:
                self.settle(used_too=True)
        finally:
            super().__exit__(kind, problem, trace)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called in place of all operations on tensors."""
        given = kwargs or {}
        if set(types) - PLAIN:  # tensors of other classes, of whose memory nothing is known
            self.settle(used_too=True)
            if func._schema.is_mutable:
                self._known.clear()
            return func(*args, **given)
        changed = list(_written(func._schema, args, given)) if func._schema.is_mutable else []
        if self._pending:
            if changed:
                self._pending.settle_readers_of(changed)
            if not func.is_view and func not in self._may_wait:
                self._all_settled(*_tensors_in((args, given)))
        found = self._ours.get(func, func)(*args, **given)
        for tensor in changed:
            self._known.forget(tensor)
        return found

    def prepare(
        self, matrices: Sequence[Tensor], targets: Sequence[Tensor] = ()
    ) -> list[Callable[[], Any]]:
        """Jobs for what would be waited for later, where the kernels are for these.

        Args:
            matrices: to multiply with; their halves.
            targets: of a cross entropy; their bounds, which its derivative is scaled by.
        """
        if torch._C._are_functorch_transforms_active():
            return []
        with forward_precision():
            three = SETTINGS.fp32_precision == "none"
        of_matrix = partial(self._pending.halves_of, three=three)
        jobs: list[tuple[Callable[[Tensor], Any], Tensor]] = [(of_matrix, x) for x in matrices]
        jobs += [(self._find_bound, target) for target in targets]
        return [
            partial(job, _rows_of(x))
            for job, x in jobs
            if self._is_rows(x) and halves.fits(_rows_of(x))
        ]

    def settle(self, *, used_too: bool = False) -> None:
        """Make all that waits, on this stream; see `Pending`."""
        self._pending.settle(used_too=used_too)

    def note_made(self, result: Any) -> None:
        """Of a job on a stream that is not waited for: whoever looks at its tensors waits then."""
        for tensor in _tensors_in(result):
            self._pending.note_made(tensor)

    def when_made(self, rows: Tensor) -> torch.cuda.Event | None:
        """A moment of this stream at which a matrix was there; None where none is known."""
        self._pending.settled(rows)
        return self._known.when_made(rows)

    # Operations -----------------------------------------------------------------------------

    def _mm(self, a: Tensor, b: Tensor) -> Any:
        if self._are_long_rows(a) and self._is_ours(b) and _is_transpose(b, a):
            self._pending.settled(a)
            found = basis_vectors.gram(a)
        else:
            found = self._product(a, b)
        return aten.mm.default(*self._all_settled(a, b)) if found is None else found

    def _mm_out(self, a: Tensor, b: Tensor, *, out: Tensor) -> Any:
        fits = self._is_rows(out) and out.shape == (a.shape[0], b.shape[1])
        found = self._product(a, b, out=out) if fits else None
        return aten.mm.out(a, b, out=out) if found is None else found

    def _addmm(self, bias: Tensor, a: Tensor, b: Tensor, **factors: Any) -> Any:
        plain = not factors and self._is_ours(bias) and bias.is_contiguous()
        found = self._product(a, b, bias) if plain and bias.shape == b.shape[1:] else None
        if found is not None:
            return found
        return aten.addmm.default(*self._all_settled(bias, a, b), **factors)

    def _mv(self, a: Tensor, x: Tensor) -> Any:
        fits = self._is_ours(x) and x.shape == a.shape[1:] and x.is_contiguous()
        if fits and self._are_long_rows(a):
            self._pending.settled(a)
            waiting = self._pending.take_sum(x)
            self._pending.settled(x)
            return basis_vectors.project(a, x, waiting)
        self._all_settled(a, x)
        if self._is_combination(a, x):
            return basis_vectors.combine(a.t(), x)
        return aten.mv.default(a, x)

    def _addmv(self, y: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Any:
        if not factors and self._may_join(y, a, x):
            return basis_vectors.combine(a.t(), x, y)
        return aten.addmv.default(y, a, x, **factors)

    def _addmv_(self, y: Tensor, a: Tensor, x: Tensor, **factors: Any) -> Any:
        sign = factors.get("alpha", 1)
        if set(factors) <= {"alpha"} and sign in (1, -1) and self._may_join(y, a, x):
            return basis_vectors.add_combination(a.t(), x, y, int(sign), y)
        return aten.addmv_.default(y, a, x, **factors)

    def _add(self, a: Any, b: Any, **factors: Any) -> Any:
        for one, other in ((a, b), (b, a)):
            waiting, bound = self._pending.waits(one), self._bound_of(other)
            if waiting is None or bound is None or factors or a.shape != b.shape:
                continue
            if waiting.product.added is None and self._pending.waits(other) is None:
                waiting.used = True
                return self._pending.wait(replace(waiting.product, added=other, bound_added=bound))
        return aten.add.Tensor(*self._all_settled(a, b), **factors)

    def _mul(self, a: Any, b: Any) -> Any:
        for one, other in ((a, b), (b, a)):
            waiting = self._pending.waits(one)
            if (
                waiting is None
                or not isinstance(other, Tensor)
                or self._pending.waits(other) is not None
            ):
                continue
            self._pending.settled(other)  # which may be a part of what waits
            if waiting.product.bounded and self._is_rows(other) and other.shape == one.shape:
                bound = self._pending.bound_of(_rows_of(other))
                found = self._pending.function_of(waiting, Function(kernels.MULTIPLE, other, bound))
                if found is not None:
                    return found
        return aten.mul.Tensor(*self._all_settled(a, b))

    def _all_settled(self, *args: Any) -> tuple[Any, ...]:
        for x in args:
            if isinstance(x, Tensor):
                self._pending.settled(x)
        return args

    def _function(self, function: Any, kind: int, *args: Any) -> Any:
        x = args[0]
        y: Tensor = args[1] if kind in BACKWARD else x
        fits = self._is_rows(y) and y.shape == x.shape and args[2:] in ((), (0,))  # of relu: from 0
        waiting = self._pending.waits(x)
        if waiting is not None and fits and kind in OF_PRODUCTS:
            if y is not x:
                self._pending.settled(y)
            of_product = replace(OF_PRODUCTS[kind], y=None if y is x else y, bound_y=self._one)
            found = self._pending.function_of(waiting, of_product)
            if found is not None:
                return found
        self._all_settled(x, y)
        bound: Tensor | None = None
        if self._is_rows(x) and x.numel() >= LEAST_NUMBERS and halves.fits(_rows_of(x)):
            bound = self._one if kind in BOUNDED_BY_ONE else self._bound_of(x)
        if bound is None or not fits:
            return function(*args)
        out = torch.empty_like(x)
        made = halves.split(_rows_of(x), bound, kind, y, out, three=self._three)
        self._known.remember(_rows_of(out), halves=made, bound=made.bound)
        return out

    # Sums over samples ----------------------------------------------------------------------

    def sums_over_rows(self, x: Tensor, *, squares: bool, out: Tensor | None = None) -> Any:
        """Σ x over rows [columns], and with squares their sum [columns] behind it; or None."""
        if not (x.dim() == 2 and self._is_rows(x) and halves.fits(x)):
            return None
        self._pending.settled(x)
        return vectors.sum_columns(x.detach(), squares=squares, out=out)

    def product_of_squares(self, a: Tensor, b: Tensor) -> Tensor | None:
        """(a²)ᵀ b² for a [m, outputs] and b [m, inputs], with the digits of tf32; or None."""
        fits = all(x.dim() == 2 and self._is_rows(x) and halves.fits(x) for x in (a, b))
        if SETTINGS.fp32_precision not in ("none", "tf32") or not fits or len(a) > LONGEST_SUM:
            return None
        of_a, of_b = self._squared(a), self._squared(b)
        return halves.product(Product(of_a, of_b, a_along=False, b_along=False, three=False))

    def _squared(self, x: Tensor) -> Halves:
        rows = x.detach()
        found = self._pending.halves_of(rows, three=False)
        return halves.square(found, self._pending.bound_of(rows))

    def scale_and_add(self, x: Tensor, scale: Tensor, other: Tensor, factor: float) -> bool:
        """X · scale + factor · other in place of a long vector x [n]; False where it is none.

        It waits for a projection.
        """
        long = LEAST_COLUMNS <= x.numel() <= halves.LARGEST
        fits = all(self._is_ours(t) and t.is_contiguous() for t in (x, scale, other))
        if not (long and fits and x.dim() == 1 and other.shape == x.shape and scale.numel() == 1):
            return False
        self._pending.settle_readers_of([x])
        self._all_settled(x, scale, other)
        self._pending.wait_with_sum(Sum(x, scale, other, factor))
        self._known.forget(x)
        return True

    # The rows of a basis --------------------------------------------------------------------

    def scale_of_length(
        self, squared: Tensor, least: float, before: Tensor, place: Tensor
    ) -> Tensor | None:
        """What makes a vector's length 1, given its square, as in `krylov`; or None."""
        if not (self._is_ours(squared) and self._is_ours(before) and self._is_ours(place)):
            return None
        self._all_settled(squared, before)
        return basis_vectors.scale_of_length(squared, least, before, place)

    def subtract_combination(
        self, w: Tensor, rows: Tensor, coefficients: Tensor, weights: Tensor
    ) -> bool:
        """W - weights ∘ Σ coefficients[k] rows[k] in place of w [n]; False where it is not ours."""
        if not (self._may_join(w, rows.t(), coefficients) and self._are_like(w, weights)):
            return False
        self._pending.settle_readers_of([w])
        self._all_settled(w, rows, coefficients, weights)
        basis_vectors.add_combination(rows, coefficients, w, -1, w, weights)
        self._known.forget(w)
        return True

    def subtract_rows(
        self, start: Tensor, divisor: Tensor | None, rows: Tensor, taken: Tensor, w: Tensor
    ) -> Tensor | None:
        """Start / divisor - Σ taken[k] rows[k] in place of the start [n], which may be w.

        Parts of its product with w, for `scale_of_remainder`; None where it is not ours.
        """
        others = [w] if divisor is None else [w, divisor]
        if not (self._may_join(start, rows.t(), taken) and self._are_like(start, *others)):
            return None
        self._pending.settle_readers_of([start])
        self._all_settled(start, rows, taken, *others)
        parts = basis_vectors.subtract_rows(start, divisor, rows, taken, w)
        self._known.forget(start)
        return parts

    def scale_of_remainder(
        self,
        parts: Tensor,
        taken: Tensor,
        along: Tensor,
        least: float,
        projected: Tensor,
        place: Tensor,
    ) -> Tensor:
        """What makes the length of a remainder 1, and beside it what was taken, as in `krylov`."""
        self._pending.settle_readers_of([projected, place])
        self._all_settled(parts, taken, along)
        scale = basis_vectors.scale_of_remainder(parts, taken, along, least, projected, place)
        self._known.forget(projected)
        self._known.forget(place)
        return scale

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy a few numbers to or from pinned memory."""
        self._pending.settled(source)
        vectors.move(source, target)

    # A loss ---------------------------------------------------------------------------------

    def may_be_cross_entropy(self, x: Any, target: Tensor) -> bool:
        """Whether `cross_entropy` is for these."""
        return (
            isinstance(x, Tensor)
            and self._is_rows(x)
            and x.dim() == 2
            and self._is_rows(target)
            and x.shape == target.shape
            and not target.requires_grad
            and not torch._C._are_functorch_transforms_active()
            and halves.fits(x)
        )

    def cross_entropy(
        self, x: Tensor, target: Tensor, share: float, *, differentiated: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Of each row a share, between the sigmoid of x and the target; torch has six kernels.

        Where it is to be differentiated, also the derivative of their sum towards x, which is of
        use if all factors of the rows turn out to be `ones`.
        """
        self._all_settled(x, target)
        x, target, losses = x.detach(), target.detach(), x.new_empty(len(x))
        if not differentiated:
            entropies.cross_entropy(x, target, share, losses=losses)
            return losses, None
        three = derivative_precision() == "none"
        delta = self._delta_of_entropy(x, target, self.ones(len(x)), self._one, three=three)
        entropies.cross_entropy(x, target, share, losses=losses, delta=delta)
        self._known.remember(delta.values, halves=delta.halves, bound=delta.halves.bound)
        return losses, delta.values

    def cross_entropy_backward(
        self, x: Tensor, target: Tensor, share: float, factors: Tensor
    ) -> Tensor:
        """The derivative towards x, with a factor for each row; torch has five kernels for that."""
        self._all_settled(x, factors)
        x, target, factors = x.detach(), target.detach(), factors.detach().contiguous()
        largest = self._bounds.some()
        halves.find_bound(factors.unsqueeze(0), largest)
        delta = self._delta_of_entropy(x, target, factors, largest, three=self._three)
        entropies.cross_entropy(x, target, share, delta=delta)
        self._known.remember(delta.values, halves=delta.halves, bound=delta.halves.bound)
        return delta.values

    def at_its_turn(self, delta: Tensor) -> Tensor:
        """The derivative that was made with its cross entropy, when it is asked for.

        What is made of it may begin now (`when_made`), and no earlier: memory for that is new.
        """
        made: Halves | None = self._known.recall(delta, "halves")
        if made is not None:
            self._known.remember(delta, halves=made, bound=made.bound)
        return delta

    def ones(self, count: int) -> Tensor:
        """So many of them [count], which no kernel has to fill, and `are_ones` knows."""
        return self._one.view(torch.float32).expand(count)

    def are_ones(self, x: Tensor) -> bool:
        """Whether these are known to be `ones`."""
        return x.data_ptr() == self._one.data_ptr() and x.stride() == (0,)

    def _delta_of_entropy(
        self, x: Tensor, target: Tensor, factors: Tensor, bound: Tensor, *, three: bool
    ) -> Delta:
        """Room for a derivative, given the bound of its factors."""
        room = halves.empty_halves(x, *x.shape, three=three, bound=torch.empty_like(bound))
        of_target = self._pending.bound_of(target)
        return Delta(torch.empty_like(x), room, factors, bound, of_target)

    # Products -------------------------------------------------------------------------------

    def _product(
        self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor | None:
        """a [M, K] times b [K, N] plus bias [N]; None where it is better made elsewhere."""
        precision, least = SETTINGS.fp32_precision, LEAST_WORK
        if self.sparing:
            precision, least = "ieee" if precision == "tf32" else precision, LEAST_WORK_ALONE
        if precision not in ("none", "tf32") or not (self._is_ours(a) and self._is_ours(b)):
            return None
        if not a.dim() == b.dim() == 2 or a.shape[1] != b.shape[0]:
            return None  # torch says what is wrong
        (m, k), n = a.shape, b.shape[1]
        if m * n * k < least or min(m, n) < 2 or k > LONGEST_SUM or m * n > halves.LARGEST:
            return None
        a_along, b_along = a.stride(1) == 1, b.stride(0) == 1
        rows_of_a, rows_of_b = a if a_along else a.t(), b.t() if b_along else b
        if not all(_has_rows(rows) and halves.fits(rows) for rows in (rows_of_a, rows_of_b)):
            return None
        three = precision == "none"
        # A weight gradient is the last of its kind: nothing is made of it.
        waits = a_along and out is None and not self.sparing
        if bias is not None:
            self._pending.settled(bias)
        of_b = self._pending.halves_of(rows_of_b, three)
        narrow = waits and chains.is_narrow(m, n, k)
        of_a = self._pending.operand(rows_of_a, three=three, narrow=narrow)
        product = Product(of_a, of_b, a_along, b_along, three, bias)
        return self._pending.wait(product) if waits else halves.product(product, out=out)

    def _find_bound(self, rows: Tensor) -> None:
        """Have it known, and no more: whoever has use for it waits for it then."""
        self._pending.bound_of(rows)

    @property
    def _three(self) -> bool:
        """Whether products have the digits of float32 now."""
        return bool(SETTINGS.fp32_precision == "none")

    def _bound_of(self, x: Any) -> Tensor | None:
        found: Tensor | None = None
        if isinstance(x, Tensor) and self._is_rows(x):
            found = self._known.recall(_rows_of(x), "bound")
        return found

    # What is what ---------------------------------------------------------------------------

    def _is_ours(self, x: Tensor) -> bool:
        plain = x.dtype is torch.float32 and x.layout is torch.strided
        return plain and x.device == self._device

    def _is_rows(self, x: Tensor) -> bool:
        """Whether it is one of ours that lies in memory row by row, without gaps; no images."""
        return self._is_ours(x) and x.dim() in (2, 3) and x.shape[-1] > 1 and x.is_contiguous()

    def _are_long_rows(self, rows: Tensor) -> bool:
        """Whether it is a few rows of a basis."""
        if not self._is_ours(rows) or rows.dim() != 2 or rows.stride(1) != 1:
            return False
        count, size = rows.shape
        return count <= basis_vectors.MOST_ROWS and LEAST_COLUMNS <= size <= halves.LARGEST

    def _is_combination(self, a: Tensor, x: Tensor) -> bool:
        """Whether a [n, count] times x is a sum of a few long rows."""
        fits = self._is_ours(x) and x.shape == a.shape[1:] and x.is_contiguous()
        return fits and a.dim() == 2 and self._are_long_rows(a.t())

    def _may_join(self, y: Tensor, a: Tensor, x: Tensor) -> bool:
        """Whether y is a vector like that sum."""
        fits = self._is_ours(y) and y.shape == a.shape[:1] and y.is_contiguous()
        return fits and self._is_combination(a, x)

    def _are_like(self, y: Tensor, *others: Tensor) -> bool:
        """Whether these are vectors like y, which is one of ours."""
        return all(self._is_ours(x) and x.shape == y.shape and x.is_contiguous() for x in others)


def _rows_of(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _tensors_in(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, tuple | list | dict):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _tensors_in(part)


def _is_transpose(b: Tensor, a: Tensor) -> bool:
    """Whether it is a itself, transposed."""
    turned = b.shape == a.shape[::-1] and b.stride() == a.stride()[::-1]
    return turned and b.data_ptr() == a.data_ptr()


def _has_rows(x: Tensor) -> bool:
    """Whether it lies in memory row by row."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _written(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that an operation changes."""
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in given if isinstance(given, list | tuple) else (given,):
                if isinstance(tensor, Tensor):
                    yield tensor
