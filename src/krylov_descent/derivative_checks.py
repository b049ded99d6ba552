"""Are second derivatives the whole of it? Some operations leave a part out and raise no error.

- An operation whose backward pass cannot be differentiated (marked `once_differentiable`, or done
  in NumPy): from Jv by double backward the paths through it are missing.
- An operation whose forward derivative takes as constant what is not (torch's layer_norm does so
  with mean and variance): in the gradient of a forward derivative a part is missing.

Each check costs a few backward passes over a few samples and is done once for a model. They compare
to √ε of the arithmetic, which is far from its rounding and from what a missing part changes.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Pieces = list[Tensor]


def check_double_backward(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], epsilon: float
) -> None:
    """Raise unless uᵀ(Jv) = (Jᵀu)ᵀv with Jv by double backward, J = ∂outputs/∂leaves.

    Jᵀu is an ordinary backward pass, and right. v is Jᵀu with the part of each leaf divided by its
    squared norm: every leaf adds one to the sum, however small its gradient is beside the others'.
    Below √ε of the largest it fades out, because there it may be nothing but rounding (a bias
    before a normalisation).

    Raises:
        RuntimeError: a part of Jv is missing.
    """
    active = [z for z in outputs if z.requires_grad]
    u = [a.requires_grad_() for a in _random_like(active)]
    images: tuple[Tensor | None, ...] = torch.autograd.grad(
        active, leaves, u, create_graph=True, allow_unused=True
    )
    reached = [image for image in images if image is not None and bool(image.any())]
    squares = [_dot([image], [image]) for image in reached]
    floor = epsilon * max(squares, default=0.0)
    attached = [
        (image, square)
        for image, square in zip(reached, squares, strict=True)
        if image.requires_grad
    ]
    tangents = torch.autograd.grad(
        [image for image, _ in attached],
        u,
        # In float64: in float32 the square of a small gradient is zero, of a large one infinite.
        [(image.detach().double() / (square + floor)).to(image) for image, square in attached],
        allow_unused=True,
        materialize_grads=True,
    )
    expected = sum(square / (square + floor) for square in squares)
    # NaN passes: it is for the step to report.
    if abs(_dot(u, tangents) - expected) > math.sqrt(epsilon):
        raise RuntimeError(
            "the backward pass of an operation cannot itself be differentiated, because it is "
            "marked once_differentiable or leaves the graph"
        )


def check_symmetric(
    product: Callable[[Pieces], Sequence[Tensor | None]], leaves: Sequence[Tensor], epsilon: float
) -> None:
    """Raise unless uᵀHv = vᵀHu for random vectors, as it is for a Hessian.

    Raises:
        RuntimeError: H is not symmetric, so a part of it is missing.
    """
    u, v = _random_like(leaves), _random_like(leaves, seed=1)
    Hu, Hv = (
        [torch.zeros_like(p) if c is None else c for c, p in zip(product(w), leaves, strict=True)]
        for w in (u, v)
    )
    size = math.sqrt(_dot(Hu, Hu)) + math.sqrt(_dot(Hv, Hv))
    if abs(_dot(u, Hv) - _dot(v, Hu)) > math.sqrt(epsilon) * size:
        raise RuntimeError(
            "the second derivative is not symmetric, so an operation leaves a part of it out"
        )


def _random_like(tensors: Sequence[Tensor], seed: int = 0) -> Pieces:
    # A generator of its own: the global random state is the user's.
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.shape, generator=generator).to(t) for t in tensors]


def _dot(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    pairs = zip(first, second, strict=True)
    return float(sum((a.detach().double() * b.detach().double()).sum() for a, b in pairs))
