"""Checks that derivatives are complete: some operations leave a part out and raise no error.

- The backward pass of an operation cannot be differentiated, because it is marked
  `once_differentiable` or computed in NumPy. Jv by double backward misses the paths through this
  operation.
- The backward pass of an operation can be differentiated along the cotangent, but has detached what
  the forward pass saved. Jv is complete, but a part of a Hessian is missing.
- The forward derivative of an operation treats as constant what is not constant (torch's layer_norm
  does so with mean and variance). The gradient of a forward derivative misses a part.

Each check costs a few backward passes over a few samples and runs once for a model. The tolerance
is √ε of the arithmetic. It is far above rounding and far below the effect of a missing part.
"""

import math
import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from krylov_descent.runtime.private import function_of

Pieces = list[Tensor]
# A direction → the product with it, or the derivative along it.
Product = Callable[[Pieces], Sequence[Tensor | None]]

# The allowed error of a difference of gradients, as a multiple of the distance between the
# differences for two neighbouring step sizes.
DIFFERENCE_ERRORS = 4
# The longest step relative to the leaves, and the ratio of each step to the next.
LONGEST_STEP, STEP_RATIO = 1e-3, 8
# The number of random directions in which a product and a difference are compared.
DIRECTIONS = 3


def check_double_backward(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], epsilon: float
) -> None:
    """Raise unless uᵀ(Jv) = (Jᵀu)ᵀv with Jv by double backward, J = ∂outputs/∂leaves.

    Jᵀu is an ordinary backward pass and taken to be right. v is Jᵀu with the part of each leaf
    divided by its squared norm. So every leaf adds 1 to the inner product, however small its
    gradient. A gradient below √ε of the largest counts for less, because it may be nothing but
    rounding (of a bias before a normalisation, say).

    Raises:
        RuntimeError: a part of Jv is missing.
    """
    active = [z for z in outputs if z.requires_grad]
    u = [a.requires_grad_() for a in _random_like(active)]
    images: tuple[Tensor | None, ...] = torch.autograd.grad(
        active, leaves, u, create_graph=True, allow_unused=True
    )
    directions, expected = _one_from_each(images, epsilon)
    attached = [
        (image, direction)
        for image, direction in zip(images, directions, strict=True)
        if image is not None and image.requires_grad and direction is not None
    ]
    tangents = torch.autograd.grad(
        [image for image, _ in attached],
        u,
        [direction for _, direction in attached],
        allow_unused=True,
        materialize_grads=True,
    )
    # NaN passes: the step itself reports it.
    if abs(_dot(u, tangents) - expected) > math.sqrt(epsilon):
        raise RuntimeError(
            "the backward pass of an operation cannot itself be differentiated, because it is "
            f"marked once_differentiable or leaves the graph{_named(outputs)}"
        )


def check_along(
    outputs: Sequence[Tensor],
    leaves: Sequence[Tensor],
    along: Callable[[Pieces], Sequence[Tensor]],
    faint: float,
    tolerance: float,
) -> None:
    """Raise unless uᵀ(Jv) = (Jᵀu)ᵀv, with Jv computed in another way than by a backward pass.

    Args:
        outputs: tensors in the graph of the leaves.
        leaves: the parameters. v is chosen as in `check_double_backward`.
        along: v → Jv, for all outputs.
        faint: the fraction of the largest squared gradient below which a leaf counts for less.
        tolerance: of the inner product, relative.

    Raises:
        RuntimeError: the backward pass is not the transpose of this Jv.
    """
    u = [
        a if z.requires_grad else torch.zeros_like(a)
        for a, z in zip(_random_like(outputs), outputs, strict=True)
    ]
    active = [i for i, z in enumerate(outputs) if z.requires_grad]
    images = torch.autograd.grad(
        [outputs[i] for i in active],
        leaves,
        [u[i] for i in active],
        retain_graph=True,
        allow_unused=True,
    )
    directions, expected = _one_from_each(images, faint)
    tangents = along(
        [torch.zeros_like(p) if v is None else v for v, p in zip(directions, leaves, strict=True)]
    )
    if abs(_dot(u, tangents) - expected) > tolerance * expected:
        raise RuntimeError(
            "the backward pass is not the derivative of the forward pass, as with detach(), a "
            f"straight-through estimator or an operation with a wrong derivative{_named(outputs)}"
        )


def check_symmetric(product: Product, leaves: Sequence[Tensor], epsilon: float) -> None:
    """Raise unless uᵀHv = vᵀHu for random vectors u and v, which holds for every Hessian.

    Raises:
        RuntimeError: H is not symmetric, so a part of it is missing.
    """
    u, v = _random_like(leaves), _random_like(leaves, seed=1)
    Hu, Hv = _filled(product(u), leaves), _filled(product(v), leaves)
    size = math.sqrt(_dot(Hu, Hu)) + math.sqrt(_dot(Hv, Hv))
    if abs(_dot(u, Hv) - _dot(v, Hu)) > math.sqrt(epsilon) * size:
        raise RuntimeError(
            "the second derivative is not symmetric, so an operation leaves a part of it out"
        )


def check_differences(
    product: Product,
    difference: Callable[[Pieces, float], Sequence[Tensor]],
    leaves: Sequence[Tensor],
    epsilon: float,
    operations: Sequence[str],
) -> None:
    """Raise if Hv is far from a difference of gradients along v in every random direction v.

    Differences are taken over steps of many sizes. A long step may cross a kink, of which H knows
    nothing, and a short step gives nothing but rounding. Of all pairs of neighbouring step sizes,
    the pair whose differences are closest is trusted, with their distance as the error.

    Args:
        product: v → Hv.
        difference: v and a step size relative to the leaves → Hv by a difference of gradients.
        leaves: the tensors towards which H is the second derivative.
        epsilon: machine epsilon of the arithmetic.
        operations: names of operations for the error message.

    Raises:
        RuntimeError: a part of H is missing.
    """
    steps = [max(LONGEST_STEP, epsilon ** (1 / 3))]
    while steps[-1] > math.sqrt(epsilon):
        steps.append(steps[-1] / STEP_RATIO)
    for seed in range(DIRECTIONS):
        v = _random_like(leaves, seed=seed)
        Hv, found = _filled(product(v), leaves), [difference(v, step) for step in steps]
        error, far, near = min(
            ((_distance(far, near), far, near) for far, near in pairwise(found)),
            key=operator.itemgetter(0),
        )
        apart = min(_distance(Hv, far), _distance(Hv, near))
        # NaN counts as agreement: the step itself reports it.
        if not apart > DIFFERENCE_ERRORS * error + math.sqrt(epsilon) * math.sqrt(_dot(far, far)):
            return
    raise RuntimeError(
        "the second derivative is not that of the gradient: the backward pass of an operation "
        f"leaves the graph ({', '.join(operations)})"
    )


def are_equal(product: Product, other: Product, leaves: Sequence[Tensor], epsilon: float) -> bool:
    """Whether two products with a matrix agree along a random vector."""
    v = _random_like(leaves)
    first, second = _filled(product(v), leaves), _filled(other(v), leaves)
    return _distance(first, second) <= math.sqrt(epsilon) * math.sqrt(_dot(first, first))


def foreign_operations(outputs: Sequence[Tensor]) -> list[str]:
    """Names of operations in the outputs' graph that are neither torch's nor this library's."""
    found: set[str] = set()
    seen: set[Any] = set()
    nodes: list[Any] = [z.grad_fn for z in outputs if z.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        function = function_of(node)
        if function is not None:
            if not function.__module__.startswith("krylov_descent."):
                found.add(function.__name__)
        elif "CppNode" in node.name():  # an extension in C++
            found.add(node.name())
        nodes += [following for following, _ in node.next_functions if following is not None]
    return sorted(found)


def _named(outputs: Sequence[Tensor]) -> str:
    """Names of foreign operations for an error message; empty if all operations are torch's own."""
    names = foreign_operations(outputs)
    return f" ({', '.join(names)})" if names else ""


def _one_from_each(
    images: Sequence[Tensor | None], faint: float
) -> tuple[list[Tensor | None], float]:
    """The v of `check_double_backward`, and (Jᵀu)ᵀv, to which each leaf adds up to 1."""
    squares = [0.0 if image is None else _dot([image], [image]) for image in images]
    floor = faint * max(squares, default=0.0)
    # In float64: in float32 the square of a small gradient underflows, that of a large one
    # overflows.
    directions = [
        None
        if image is None or square == 0
        else (image.detach().double() / (square + floor)).to(image)
        for image, square in zip(images, squares, strict=True)
    ]
    return directions, sum(square / (square + floor) for square in squares if square)


def _filled(found: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> Pieces:
    return [torch.zeros_like(p) if c is None else c for c, p in zip(found, leaves, strict=True)]


def _distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    apart = [a.double() - b.double() for a, b in zip(first, second, strict=True)]
    return math.sqrt(_dot(apart, apart))


def _random_like(tensors: Sequence[Tensor], seed: int = 0) -> Pieces:
    # A separate generator leaves the user's global random state alone.
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator).to(t) for t in tensors]


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return float(sum((a.detach().double() * b.detach().double()).sum() for a, b in pairs))
