"""Libraries that are compared must multiply with the same matrix."""

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.candidates import OURS, Candidate, Prepare
from benchmarks.workloads import Workload

# In float32; beyond, they do not measure the same.
AGREEMENT = 1e-3
# Of the central difference, relative to the vector: errors of third order and of rounding balance.
DIFFERENCE_STEP = 1e-5


@dataclass(frozen=True)
class Built:
    """A candidate ready to be prepared, or why it cannot be.

    `off` is how far its product is from a difference of gradients, where that is too far.
    """

    candidate: Candidate
    prepare: Prepare | None
    failure: str = ""
    off: float | None = None


def build(candidates: list[Candidate], workload: Workload, vector: Tensor) -> list[Built]:
    """All that is done once, a first product, and a look whether the libraries agree.

    What another library cannot do, or does wrong, is its answer and is reported as such.

    Raises:
        RuntimeError: they differ, and it is not the other library that is wrong.
    """
    built: list[Built] = []
    first: dict[str, Tensor] = {}
    for candidate in candidates:
        try:
            prepare = candidate.build(workload)
            found = _direction(prepare()(vector))
        except Exception as problem:
            if candidate.library == OURS:
                raise
            built.append(Built(candidate, None, failure=_first_line(problem)))
            print(f"{candidate.library}, {candidate.curvature} fails: {built[-1].failure}")
            continue
        own = first.setdefault(candidate.curvature, found)
        off = None
        if not float((found - own).norm()) <= AGREEMENT:
            off = _who_is_off(candidate, workload, vector, own, found)
            print(f"{candidate.library}, {candidate.curvature} is off by {off:.1e}")
        built.append(Built(candidate, prepare, off=off))
    return built


def _who_is_off(
    candidate: Candidate, workload: Workload, vector: Tensor, own: Tensor, theirs: Tensor
) -> float:
    """How far the other library is from the truth, where that can be told without either."""
    difference = float((theirs - own).norm())
    if candidate.curvature == "hessian":
        truth = _direction(central_difference(workload, vector)).to(own.dtype)
        if float((own - truth).norm()) <= AGREEMENT:
            return float((theirs - truth).norm())
    raise RuntimeError(
        f"{candidate.library} and {OURS} differ by {difference:.1e} in the "
        f"{candidate.curvature} product: they do not measure the same matrix"
    )


def central_difference(workload: Workload, vector: Tensor) -> Tensor:
    """Hessian times vector from two gradients in float64."""
    model = copy.deepcopy(workload.model).double()
    real = workload.targets.is_floating_point()
    exact = replace(
        workload,
        model=model,
        inputs=workload.inputs.double(),
        targets=workload.targets.double() if real else workload.targets,
    )
    size = DIFFERENCE_STEP / float(vector.norm())
    pieces = vector.double().split([p.numel() for p in model.parameters()])

    def gradient_at(distance: float) -> Tensor:
        with torch.no_grad():
            for p, piece in zip(model.parameters(), pieces, strict=True):
                p.add_(distance * piece.reshape(p.shape))
        with sdpa_kernel(SDPBackend.MATH):
            return torch.cat([g.reshape(-1) for g in exact.gradient()])

    after = gradient_at(size)
    before = gradient_at(-2 * size)
    return (after - before) / (2 * size)


def _direction(product: Tensor) -> Tensor:
    """Up to a factor: libraries weigh the elements of a sample differently in Fisher's matrix."""
    return F.normalize(product, dim=0)


def _first_line(problem: Exception) -> str:
    return next(iter(str(problem).strip().splitlines()), type(problem).__name__)[:160]
