"""The Jacobian of the outputs as a matrix in memory, for models whose forward pass differentiates.

There a product by autograd takes two gradients or more, each through the graph of the derivatives.
With the matrix J [rows, n], which has a row for each output of each sample, a product is J times a
vector, and its transpose times another one.

A sample has its own row, so a row is the gradient by weights that only this sample uses. A linear
function y = Wx, with a cotangent δ of the outputs, adds δxᵀ to the gradient by W for this sample.
The model uses W in its forward pass, and again in each derivative of it, which is a linear function
with W or Wᵀ. So one backward pass gives δ and x of each use. (Parameters of other functions, as
unknown coefficients are, have a column each, by one more backward pass.)
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from krylov_descent.curvature.derivative_checks import are_equal
from krylov_descent.curvature.forward_mode import BatchProduct
from krylov_descent.objective.batches import Batch, Tree, floating_tensors_in, map_tensors
from krylov_descent.objective.losses import OutputHessian
from krylov_descent.objective.network import Network
from krylov_descent.runtime.messages import is_out_of_memory
from krylov_descent.runtime.private import transforms_are_active

# (rows, columns, dtype=, device=) → an uninitialised matrix.
MakeRoom = Callable[..., Tensor]
# Entries of parameters that no linear function uses.
MOST_OTHERS = 16
# Of a sample. Each needs a backward pass, and with more of them J saves less.
MOST_OUTPUTS = 4
# Bytes of J on a GPU, where reading it twice takes as long as a product by autograd.
LARGEST_ON_GPU = 1 << 30


class NoJacobianError(RuntimeError):
    """The rows cannot be had from linear functions."""


class Uses:
    """The uses of parameters by linear functions, as a backward pass comes along them.

    Args:
        parameters: the trainable ones.

    Attributes:
        used: indices of the parameters that were used in a forward pass.
        pairs: for the index of a W the pairs (δ [m, ..., outputs], x [m, ..., inputs]), and for
            that of a bias the δ alone; None while a backward pass is not to be noted.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._index = {id(p): i for i, p in enumerate(parameters)}
        self.used: set[int] = set()
        self.pairs: dict[int, list[tuple[Tensor, Tensor | None]]] | None = None

    def index(self, p: Tensor | None) -> int | None:
        """Of a parameter; None for other tensors."""
        return self._index.get(id(p))

    def note(self, index: int | None, delta: Tensor, x: Tensor | None) -> None:
        """Note a use in the current backward pass."""
        if self.pairs is not None and index is not None:
            self.pairs.setdefault(index, []).append((delta, x))


class _Linear(torch.autograd.Function):
    """x, W, b → xWᵀ + b, or x, W → xW, whose derivatives note the uses of W and b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, uses: Uses, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.uses, ctx.transposed = uses, transposed
        ctx.weight, ctx.bias = uses.index(weight), uses.index(bias)
        return x @ weight if transposed else functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,) = cotangents
        x, weight = ctx.saved_tensors
        uses: Uses = ctx.uses
        uses.note(ctx.weight, *((x, cotangent) if ctx.transposed else (cotangent, x)))
        uses.note(ctx.bias, cotangent, None)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _linear(cotangent, weight, None, uses, transposed=not ctx.transposed)
        return of_x, None, None, None, None


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, uses: Uses, *, transposed: bool
) -> Tensor:
    found: Tensor = _Linear.apply(x, weight, bias, uses, transposed)  # type: ignore[no-untyped-call]
    return found


class _NotedLinear(TorchFunctionMode):
    """A context manager in which linear functions of trainable parameters note their uses."""

    def __init__(self, uses: Uses, device: torch.device) -> None:
        super().__init__()
        self._uses, self._kind = uses, device.type

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called in place of every torch function on tensors."""
        kwargs = kwargs or {}
        if func is functional.linear and not torch.is_autocast_enabled(self._kind):
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        found = {self._uses.index(weight), self._uses.index(bias)} - {None}
        if not found or transforms_are_active():
            return functional.linear(input, weight, bias)
        self._uses.used |= found  # type: ignore[arg-type]
        return _linear(input, weight, bias, self._uses, transposed=False)


def bytes_per_sample(
    network: Network, few: Batch, by_autograd: BatchProduct, epsilon: float
) -> float:
    """The memory of J per sample; infinite where it cannot be made or does not pay.

    Args:
        network: model and loss.
        few: samples, with which products by J are compared with others.
        by_autograd: those others.
        epsilon: machine epsilon of the arithmetic.
    """
    parameters = network.parameters
    found = floating_tensors_in(network.outputs(few, eager=True))
    # A number that all samples share has no row of its own.
    numbers = max(z.numel() / max(1, len(z)) if z.dim() else math.inf for z in found)
    if numbers > MOST_OUTPUTS:
        return math.inf
    try:
        by_jacobian = gauss_newton(network, few)
        equal = are_equal(by_autograd, by_jacobian, parameters.tensors, epsilon)
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        return math.inf
    return numbers * parameters.empty().nbytes if equal else math.inf


def _nobody() -> None:
    """In place of a weak reference to an owner that is gone."""


class Room:
    """Memory for Jacobians, used again when the product that they were for is gone.

    On a CPU the system takes longer to give new memory than the numbers of J take to compute. On
    other devices torch itself keeps memory for reuse.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._taken = 0
        self._owner: Callable[[], object] = _nobody

    def __reduce__(self) -> tuple[Any, ...]:
        return Room, ()  # a copy has no memory yet

    def take(
        self, owner: object, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised matrix [rows, columns], for the life of the owner, who may take more."""
        if device.type != "cpu":
            return torch.empty(rows, columns, dtype=dtype, device=device)
        if self._owner() is not owner:
            if self._owner() is not None:
                self._parts = []
            self._owner, self._taken = weakref.ref(owner), 0
        place, size = self._taken, rows * columns
        self._taken += 1
        part = self._parts[place] if place < len(self._parts) else torch.empty(0)
        if len(part) < size or part.dtype != dtype:
            part = torch.empty(size, dtype=dtype)
            self._parts[place:] = [part]
        return part[:size].view(rows, columns)


@dataclass(frozen=True, slots=True)
class Jacobian:
    """J of the outputs for a batch.

    Attributes:
        matrix: J [rows, n], with a row for each number in the outputs, tensor by tensor.
        outputs: those of the model, without their graph.
        output_hessian: v → H_E v for pieces shaped like the tensors of the outputs.
    """

    matrix: Tensor
    outputs: Tree
    output_hessian: OutputHessian

    @property
    def pieces(self) -> list[Tensor]:
        """The floating-point tensors of the outputs."""
        return floating_tensors_in(self.outputs)

    def curved(self, column: Tensor) -> Tensor:
        """H_E times a number for each row [rows]."""
        shapes = [z.shape for z in self.pieces]
        parts = column.split([shape.numel() for shape in shapes])
        vectors = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return torch.cat([z.reshape(-1) for z in self.output_hessian(vectors)])


def jacobian(network: Network, batch: Batch, room: MakeRoom = torch.empty) -> Jacobian:
    """J for a batch. Making it takes about as long as three gradients for each output of a sample.

    Args:
        network: model and loss.
        batch: the samples.
        room: makes memory for J.

    Raises:
        NoJacobianError: the rows cannot be had from linear functions.
        RuntimeError: see `Network.check_leaves`.
    """
    parameters = network.parameters
    uses = Uses(parameters.tensors)
    with _NotedLinear(uses, parameters.device):
        outputs = network.outputs(batch, eager=True)
    found = floating_tensors_in(outputs)
    network.check_leaves(found)
    rows, dtype, device = sum(z.numel() for z in found), parameters.dtype, parameters.device
    matrix = room(rows, parameters.numel, dtype=dtype, device=device)
    fill(matrix, found, parameters.tensors, uses)
    outputs = map_tensors(Tensor.detach, outputs)
    return Jacobian(matrix, outputs, network.output_hessian(outputs, batch))


def gauss_newton(network: Network, batch: Batch, room: MakeRoom = torch.empty) -> BatchProduct:
    """v → Σ JᵀH_E Jv over the batch, with J in memory; see `jacobian`."""
    parameters, found = network.parameters, jacobian(network, batch, room)

    def product(pieces: list[Tensor]) -> list[Tensor | None]:
        curved = found.curved(found.matrix @ parameters.flatten(pieces))
        return [*parameters.pieces(found.matrix.t() @ curved)]

    return product


def fill(matrix: Tensor, outputs: list[Tensor], parameters: Sequence[Tensor], uses: Uses) -> None:
    """Compute J, with a row for each number in the outputs.

    Args:
        matrix: for J [rows, n].
        outputs: tensors [samples, ...], in a graph that noted the uses of parameters.
        parameters: the trainable ones, with n numbers.
        uses: of the parameters.

    Raises:
        NoJacobianError: too many parameters have other uses, or a linear function was not called
            with a row for each sample.
    """
    others = [i for i in range(len(parameters)) if i not in uses.used]
    if sum(parameters[i].numel() for i in others) > MOST_OTHERS:
        raise NoJacobianError("not all parameters are those of linear functions")
    sizes = [p.numel() for p in parameters]
    for z, rows in zip(outputs, matrix.split([z.numel() for z in outputs]), strict=True):
        columns = rows.split(sizes, 1)
        if z.requires_grad:
            _fill_columns(z, parameters, uses, columns)
            _fill_other_columns(z, {i: parameters[i] for i in others}, columns)
        else:
            rows.zero_()


def _fill_columns(
    z: Tensor, parameters: Sequence[Tensor], uses: Uses, columns: Sequence[Tensor]
) -> None:
    """The columns of parameters of linear functions."""
    per_sample = z.reshape(len(z), -1).unbind(1)
    for number, output in enumerate(per_sample):
        uses.pairs = {}
        torch.autograd.grad(output.sum(), parameters, retain_graph=True, allow_unused=True)
        found, uses.pairs = uses.pairs, None
        with torch.no_grad():
            for i in uses.used:
                own = columns[i][number :: len(per_sample)].unflatten(1, parameters[i].shape)
                if i in found:
                    _sum_uses(found[i], own)
                else:
                    own.zero_()


def _sum_uses(pairs: list[tuple[Tensor, Tensor | None]], into: Tensor) -> None:
    """Σ δxᵀ [samples, outputs, inputs] over the uses of a W, or Σ δ [samples, outputs]."""
    samples = len(into)
    if any(len(delta) != samples or delta.dim() < 2 for delta, _ in pairs):
        raise NoJacobianError("a linear function has other rows than one for each sample")
    deltas = torch.cat([delta.reshape(samples, -1, delta.shape[-1]) for delta, _ in pairs], 1)
    inputs = [x.reshape(samples, -1, x.shape[-1]) for _, x in pairs if x is not None]
    if inputs:
        torch.bmm(deltas.transpose(1, 2), torch.cat(inputs, 1), out=into)
    else:
        torch.sum(deltas, 1, out=into)


def _fill_other_columns(z: Tensor, others: dict[int, Tensor], columns: Sequence[Tensor]) -> None:
    """The columns of parameters that no linear function uses."""
    if not others:
        return
    cotangent = torch.zeros_like(z, requires_grad=True)
    found: tuple[Tensor | None, ...] = torch.autograd.grad(
        z, [*others.values()], cotangent, create_graph=True, allow_unused=True
    )
    for i, image in zip(others, found, strict=True):
        if image is None or not image.requires_grad:
            columns[i].zero_()
            continue
        for column, entry in zip(columns[i].unbind(1), image.reshape(-1).unbind(), strict=True):
            (of_rows,) = torch.autograd.grad(entry, cotangent, retain_graph=True)
            column.copy_(of_rows.detach().reshape(-1))
