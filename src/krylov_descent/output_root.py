"""A square root of the loss's curvature in the outputs, times random signs.

With H_E = RRᵀ and independent signs s, the mean of (Rs)(Rs)ᵀ is H_E. So one backward pass from Rs
gives δ whose second moments are those of the Gauss-Newton matrix, which the gradients of the
losses have only where the model is right.
"""

import math

import torch
from torch import Tensor

from krylov_descent.losses import OutputHessian

# Per sample, or position: the matrix and its eigenvectors are formed for each.
LARGEST_DENSE = 64
AGREEMENT = 1e-3


def is_diagonal(hessian: OutputHessian, outputs: list[Tensor]) -> bool | None:
    """Whether H_E acts on each output by itself, as that of squared and logistic losses does.

    None where it is not finite.
    """
    signs = [signs_like(z) for z in outputs]
    found = hessian(signs)
    alone = [d * s for d, s in zip(_row_sums(hessian, outputs), signs, strict=True)]
    error = sum(float((a - b).double().norm()) for a, b in zip(found, alone, strict=True))
    size = sum(float(a.double().norm()) for a in found)
    return error <= AGREEMENT * size if math.isfinite(error + size) else None


def root_times_signs(
    hessian: OutputHessian, outputs: list[Tensor], *, diagonal: bool
) -> list[Tensor]:
    """Rs for each of the output tensors; negative curvature counts as none.

    Args:
        hessian: v → H_E v.
        outputs: z, of any shape if H_E is diagonal, else one tensor [m, C, …].
        diagonal: what `is_diagonal` found.

    Cost: a product with H_E, or C of them and the eigenvectors of a C × C matrix per sample.

    Raises:
        ValueError: H_E is not diagonal, and larger than can be formed.
    """
    if diagonal:
        sums = _row_sums(hessian, outputs)
        return [d.clamp(min=0).sqrt() * signs_like(z) for d, z in zip(sums, outputs, strict=True)]
    if len(outputs) > 1 or outputs[0].dim() < 2 or outputs[0].shape[1] > LARGEST_DENSE:
        raise ValueError(
            "`preconditioner='kronecker'` needs a loss whose second derivative in the outputs is "
            "diagonal, as that of squared and logistic errors, or one over up to "
            f"{LARGEST_DENSE} classes in dimension 1 of a single output, found "
            f"{[tuple(z.shape) for z in outputs]}: use 'fisher-diagonal'"
        )
    z = outputs[0]
    columns = []
    for c in range(z.shape[1]):
        unit = torch.zeros_like(z)
        unit[:, c] = 1
        columns.append(hessian([unit])[0].movedim(1, -1))
    full = torch.promote_types(z.dtype, torch.float32)  # eigh knows no half precision
    values, vectors = torch.linalg.eigh(torch.stack(columns, -1).to(full))
    signs = signs_like(z).movedim(1, -1).to(full).unsqueeze(-1)
    roots = vectors @ (values.clamp(min=0).sqrt().unsqueeze(-1) * signs)
    return [roots.squeeze(-1).movedim(-1, 1).to(z.dtype)]


def signs_like(z: Tensor) -> Tensor:
    """±1 in the shape of z, by its positions alone: the same on every machine and at every step.

    The bits are those of SplitMix64, a random generator that is a function of a counter, so that
    it can be recorded as a CUDA graph.
    """
    x = torch.arange(1, z.numel() + 1, device=z.device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift)) * factor
    return ((x ^ (x >> 31)) & 1).mul_(2).sub_(1).to(z.dtype).reshape(z.shape)


def _row_sums(hessian: OutputHessian, outputs: list[Tensor]) -> list[Tensor]:
    """H_E 1, which is its diagonal if it has nothing else."""
    return hessian([torch.ones_like(z) for z in outputs])
