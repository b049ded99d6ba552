"""A square root of the loss's curvature in the outputs, times random signs.

With H_E = RRᵀ and independent random signs s, the mean of (Rs)(Rs)ᵀ is H_E. So one backward pass
that starts with Rs gives cotangents δ with the second moments of the Gauss-Newton matrix. The
gradients of the losses have these second moments only if the model is right.

H_E of nearly every loss has one of two forms that have a root in closed form:

    diagonal   diag(d)              R = diag(√d)             squared and logistic errors
    softmax    w (diag(p) − ppᵀ)    R = √w (diag(√p) − p√pᵀ)   cross-entropy over classes
"""

import math
from typing import Literal

import torch
from torch import Tensor

from krylov_descent.objective.losses import OutputHessian
from krylov_descent.runtime.random_signs import signs_like

Form = Literal["diagonal"] | int
"""The form of H_E: diagonal, or the dimension of the classes of a softmax over a single output."""

# Tolerances for the agreement of H_E with a form: relative, and in rounding errors of the outputs,
# which may be in bfloat16.
AGREEMENT, ROUNDINGS = 1e-3, 4


def form_of(hessian: OutputHessian, outputs: list[Tensor]) -> Form | None:
    """The form of H_E at these outputs; None if H_E is zero or not finite.

    Args:
        hessian: v → H_E v.
        outputs: z, with the batch in dimension 0.

    Raises:
        ValueError: H_E has neither form.
    """
    probe = _probe(outputs)
    found = hessian(probe)
    size = math.hypot(*(float(h.double().norm()) for h in found))
    if size == 0 or not math.isfinite(size):
        return None
    row_sums = hessian([torch.ones_like(z) for z in outputs])
    if _agree(found, [d * v for d, v in zip(row_sums, probe, strict=True)], size):
        return "diagonal"
    if len(outputs) == 1:
        z, v = outputs[0], probe[0]
        for dimension in sorted({1, z.dim() - 1} & set(range(1, z.dim()))):
            p, weight = _softmax(hessian, z, dimension)
            if _agree(found, [weight * (p * v - p * (p * v).sum(dimension, True))], size):
                return dimension
    raise ValueError(
        "`preconditioner='kronecker'` needs a loss whose second derivative in the outputs is "
        "diagonal, as that of squared and logistic errors, or that of a cross-entropy over classes "
        f"in dimension 1 or the last one; found neither for outputs of shape "
        f"{[tuple(z.shape) for z in outputs]}: use 'fisher-diagonal'"
    )


def root_times_signs(hessian: OutputHessian, outputs: list[Tensor], form: Form) -> list[Tensor]:
    """Rs for each of the output tensors. Negative curvature counts as zero.

    Args:
        hessian: v → H_E v.
        outputs: z.
        form: of H_E, by `form_of`.

    Cost: a product with H_E.
    """
    if form == "diagonal":
        row_sums = hessian([torch.ones_like(z) for z in outputs])
        roots = [d.clamp(min=0).sqrt() for d in row_sums]
        return [root * s for root, s in zip(roots, signs_like(outputs), strict=True)]
    (z,), (s,) = outputs, signs_like(outputs)
    p, weight = _softmax(hessian, z, form)
    root = p.sqrt()
    return [weight.sqrt() * (root * s - p * (root * s).sum(form, True))]


def _softmax(hessian: OutputHessian, z: Tensor, dimension: int) -> tuple[Tensor, Tensor]:
    """p, and the w ≥ 0 for which w (diag(p) − ppᵀ) is closest to H_E.

    w is the class weight of each sample, and 0 where the target is ignored.
    """
    (v,) = _probe([z])
    (found,) = hessian([v])
    p = z.detach().softmax(dimension)
    unit = p * v - p * (p * v).sum(dimension, True)
    weight = (found * unit).sum(dimension, True) / (unit * unit).sum(dimension, True)
    return p, torch.where(weight > 0, weight, 0.0)


def _probe(outputs: list[Tensor]) -> list[Tensor]:
    """Vectors along no special direction: cosines of the positions."""
    probes, first = [], 1
    for z in outputs:
        positions = torch.arange(first, first + z.numel(), device=z.device)
        probes.append(positions.cos().to(z.dtype).reshape(z.shape))
        first += z.numel()
    return probes


def _agree(found: list[Tensor], expected: list[Tensor], size: float) -> bool:
    errors = [float((a - b).double().norm()) for a, b in zip(found, expected, strict=True)]
    epsilon = max(torch.finfo(h.dtype).eps for h in found)
    return math.hypot(*errors) <= max(AGREEMENT, ROUNDINGS * epsilon) * size
