"""Curvature as a product v → Hv, linearised once at a fixed point (paper, Section 2).

There are three matrices, each a mean over the samples of set B, plus λ for the L2 term:

    gauss-newton   JᵀH_E J, with J = ∂outputs/∂θ and H_E the loss's Hessian in the outputs
    hessian        ∂²f/∂θ²
    fisher         Σ gᵢgᵢᵀ, which is JᵀJ with J = ∂(per-sample losses)/∂θ

J is mostly applied without being formed. Jᵀu is a backward pass, linear in u. A backward pass
through the graph of Jᵀu, towards u, is Jv. The graph of Jᵀu is built once per step, so a product
costs two backward passes and no forward pass: about 4/3 of a gradient, less where the first layer
needs no input gradient.

For a model whose forward pass differentiates, J is made once and kept where it fits into memory
(`kept_jacobian`).

If an operation has no second derivative, products use forward-mode differentiation, with a fresh
forward pass each. If it has no forward derivative either, products use central differences of first
derivatives (`finite_differences`).
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from krylov_descent.curvature import (
    double_backward,
    finite_differences,
    forward_mode,
    kept_jacobian,
)
from krylov_descent.curvature.forward_mode import BatchProduct
from krylov_descent.curvature.kept_jacobian import MakeRoom
from krylov_descent.curvature.route_checks import (
    CurvatureError,
    check_by_differences,
    check_by_double_backward,
    check_by_forward_mode,
)
from krylov_descent.objective.batches import Batch, Stream, as_samples
from krylov_descent.objective.contract_probe import PROBE_SAMPLES, Findings
from krylov_descent.objective.network import Network
from krylov_descent.objective.objective import Objective
from krylov_descent.objective.pass_measures import kept_bytes
from krylov_descent.runtime.messages import first_line, is_out_of_memory

__all__ = ["Curvature", "CurvatureError", "CurvatureKind", "CurvatureProduct", "Product"]

CurvatureKind = Literal["gauss-newton", "hessian", "fisher"]
Product = Callable[[Tensor], Tensor]

# Routes of differentiation, in the order in which they are tried.
ROUTES = (
    "double backward",
    "forward-mode differentiation",
    "central differences of first derivatives",
)
DIFFERENCES = 2
_DERIVATIVES = {
    "gauss-newton": (double_backward.gauss_newton, forward_mode.gauss_newton),
    "hessian": (double_backward.hessian, forward_mode.hessian),
    "fisher": (double_backward.fisher, forward_mode.fisher),
}
_DIFFERENCES = {
    "gauss-newton": finite_differences.gauss_newton,
    "hessian": finite_differences.hessian,
    "fisher": finite_differences.fisher,
}
_CHECKS = (check_by_double_backward, check_by_forward_mode, check_by_differences)


class Curvature:
    """One kind of curvature. Remembers which route of differentiation works for the model.

    Args:
        kind: "gauss-newton", "hessian" or "fisher".

    Raises:
        ValueError: the kind is unknown.
    """

    def __init__(self, kind: CurvatureKind = "gauss-newton") -> None:
        if kind not in get_args(CurvatureKind):
            raise ValueError(
                f"`curvature` must be one of {', '.join(map(repr, get_args(CurvatureKind)))}, "
                f"found {kind!r}"
            )
        self.kind: CurvatureKind = kind
        self._route = 0
        self._findings: Findings | None = None  # for which the route was checked
        self._bytes_per_sample, self._step = 1.0, 0.0
        self._jacobian_bytes, self._room = math.inf, kept_jacobian.Room()

    def at(self, objective: Objective, data: Any) -> "CurvatureProduct":
        """The product v → Hv over the data at the current parameters."""
        return CurvatureProduct(self, objective, data)

    @property
    def keeps_graphs(self) -> bool:
        """Whether the graph of a linearisation can be kept and used for further products."""
        return self._route == 0

    def linearize(
        self, network: Network, batch: Batch, room: MakeRoom | None = None
    ) -> BatchProduct:
        """Prepare v → Hv, summed over one batch, for pieces shaped like the parameters.

        Args:
            network: model and loss.
            batch: the samples.
            room: makes memory for J; None for products without it.
        """
        if room is not None:
            return kept_jacobian.gauss_newton(network, batch, room)
        if self._route < DIFFERENCES:
            return _DERIVATIVES[self.kind][self._route](network, batch)
        return _DIFFERENCES[self.kind](network, batch, self._step)

    def flat_product(self, network: Network, batch: Batch, room: MakeRoom | None = None) -> Product:
        """Prepare v → Hv, summed over one batch, for vectors [n]; see `linearize`."""
        product, parameters = self.linearize(network, batch, room), network.parameters
        return lambda vector: parameters.flatten(product(parameters.pieces(vector)))

    def fall_back(self, problem: RuntimeError, objective: Objective, batch: Batch) -> None:
        """Switch to the next route that passes its check on a few samples of the batch, and warn.

        Raises:
            CurvatureError: no route is left.
        """
        self._findings = None
        problems = [f"by {ROUTES[self._route]} ({first_line(problem)})"]
        while self._route < DIFFERENCES:
            self._route += 1
            try:
                self._check(objective, batch)
            except CurvatureError:
                raise
            except RuntimeError as another:
                if is_out_of_memory(another):
                    raise
                problem = another
                problems.append(f"by {ROUTES[self._route]} ({first_line(problem)})")
                continue
            warnings.warn(
                f"the model has no second derivative {', nor '.join(problems)}; curvature products "
                f"use {self._described()}",
                stacklevel=2,
            )
            return
        raise CurvatureError(
            f"curvature {self.kind!r} is not available for this model, not "
            f"{', nor '.join(problems)}: LBFGS and NonlinearCG do without it"
        ) from problem

    def _described(self) -> str:
        if self._route < DIFFERENCES:
            return f"{ROUTES[self._route]}, which costs about twice as much"
        return (
            f"{ROUTES[self._route]}, which cost about two gradients each and are exact to about "
            f"{self._step**2:.0e} where model and loss are smooth"
        )

    @property
    def bytes_per_sample(self) -> float:
        """Memory that a kept linearisation takes per sample, as measured by the check."""
        return self._bytes_per_sample

    @property
    def jacobian_bytes(self) -> float:
        """Memory of the rows of J per sample, infinite where J is not to be made."""
        return self._jacobian_bytes

    def room(self, owner: object) -> MakeRoom:
        """Makes memory for J, which is kept as long as the owner lives."""
        return partial(self._room.take, owner)

    def give_up_jacobian(self) -> None:
        """Compute all further products without J, and free its memory."""
        self._jacobian_bytes, self._room = math.inf, kept_jacobian.Room()

    def check(self, objective: Objective, batch: Batch) -> None:
        """Check on a few samples that the route gives the whole curvature; once for a model.

        Raises:
            RuntimeError: the route cannot be used.
        """
        if self._findings is not objective.findings:
            self._check(objective, batch)

    def _check(self, objective: Objective, batch: Batch) -> None:
        network, findings = objective.network, objective.findings
        few = batch.spread(PROBE_SAMPLES)
        self._step = finite_differences.relative_step(findings.epsilon)
        _CHECKS[self._route](self.kind, self.linearize, network, few, findings)
        if self.keeps_graphs:
            half = few.rows(0, max(1, few.size // 2))
            sizes = [
                kept_bytes(partial(self.linearize, network, piece), network.parameters.tensors)
                for piece in (few, half)
            ]
            growth = (sizes[0] - sizes[1]) / max(1, few.size - half.size)
            per_sample = growth if few.size > half.size else float(sizes[0])
            self._bytes_per_sample = max(1.0, per_sample)
        self._jacobian_bytes = math.inf
        if self.kind == "gauss-newton" and self.keeps_graphs and findings.forward_differentiates:
            self._jacobian_bytes = kept_jacobian.bytes_per_sample(
                network, few, self.linearize(network, few), findings.derivative_epsilon
            )
        self._findings = findings


def _held(objective: Objective, data: Any) -> list[Batch]:
    """The data in micro-batches. Those of a stream are copied, because it may reuse its tensors."""
    samples = as_samples(data, may_be_empty=objective.ranks.together)
    batches = objective.micro_batches(samples)
    return [b.map(torch.clone) if isinstance(samples, Stream) else b for b in batches]


class CurvatureProduct:
    """Products v → Hv over one set of samples at one point.

    Valid until the parameters change. Memory: J where it is made and fits into the objective's
    `activation_memory`, or the graphs of all samples if they fit. Otherwise one micro-batch has a
    graph at a time, which is rebuilt for each product (about 2.3 gradients instead of 4/3).

    Attributes:
        objective: f.
        samples: |B|, over all ranks.
        products: how many products were computed.
        kept: whether the graphs, or J, are kept on this rank.
        by_jacobian: whether the products were planned to be by J, on all ranks.
        scale: the factor on the sum over the samples.

    Raises:
        ValueError: no sample counts.
    """

    def __init__(self, curvature: Curvature, objective: Objective, data: Any) -> None:
        self._curvature, self.objective = curvature, objective
        self._batches: list[Batch] = []
        self._kept_products: list[BatchProduct] = []
        self._keeps_jacobian = False  # on this rank
        self._of_single_batch: Product | None = None
        self.kept, self.products = True, 0
        own = torch.zeros(3, dtype=torch.float64)
        with objective.ranks.own_work():
            own = self._prepare(_held(objective, data))
        samples, normaliser, by_jacobian = objective.ranks.sum_numbers(own).tolist()
        if normaliser == 0:
            raise ValueError(
                "the set for the curvature has no sample that counts: it is empty, or every "
                "target is ignored or has weight zero"
            )
        self.samples, self.by_jacobian = int(samples), by_jacobian == samples
        # A sample with loss nᵢ contributes nᵢN/W to the mean over N samples, with W the normaliser.
        # The Fisher matrix is the sum of the squared contributions, divided by N.
        self.scale = self.samples / normaliser**2 if curvature.kind == "fisher" else 1 / normaliser

    @property
    def kind(self) -> CurvatureKind:
        """The kind of curvature."""
        return self._curvature.kind

    @property
    def batches(self) -> Sequence[Batch]:
        """This rank's samples, in micro-batches."""
        return self._batches

    @property
    def keeps_jacobian(self) -> bool:
        """Whether products on this rank are by J."""
        return self._keeps_jacobian

    @property
    def single_batch(self) -> Batch | None:
        """All samples of this rank if they are one batch with a kept graph or J, else None."""
        return self._batches[0] if self.kept and len(self._batches) == 1 else None

    @property
    def jacobian_bytes(self) -> float:
        """Memory of J over all samples of this rank; infinite where it is not to be made."""
        return self._curvature.jacobian_bytes * sum(batch.size for batch in self._batches)

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv as a new vector [n], summed over ranks."""
        return self.objective.ranks.sum_vector(self.part(vector))

    def part(self, vector: Tensor) -> Tensor:
        """This rank's summand of Hv, as a new vector [n]. Rank 0 adds the L2 term."""
        ranks = self.objective.ranks
        result: Tensor | None = None
        with ranks.own_work():
            result = self._own_product(vector).mul_(self.scale)
        self.products += 1
        if result is None:
            return torch.zeros_like(vector)
        if ranks.leads:
            self.objective.parameters.add_decay(result, vector)
        return result

    def give_up_jacobian(self) -> None:
        """Compute further products, of this and of later steps, without J."""
        self._kept_products, self._of_single_batch = [], None
        self._curvature.give_up_jacobian()
        self._batches, self.kept = self._fit(self._batches)

    def _fall_back(self, problem: RuntimeError, batch: Batch) -> None:
        with self.objective.value_mode():  # raises errors that are not about derivatives
            self.objective.network.sample_losses(batch.rows(0, 1))
        self._curvature.fall_back(problem, self.objective, batch)

    def _own_product(self, vector: Tensor) -> Tensor:
        try:
            return self._sum(vector)
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            if self._keeps_jacobian:
                self.give_up_jacobian()
            else:
                self._kept_products, self._of_single_batch = [], None
                self._fall_back(problem, self._batches[0])
                self.kept = False
            return self._own_product(vector)

    def _prepare(self, batches: list[Batch]) -> Tensor:
        """Store this rank's samples.

        Returns:
            Their number, their normaliser, and the number of those with rows of J [3].
        """
        samples = sum(batch.size for batch in batches)
        loss = self.objective.network.loss
        normaliser = sum(float(loss.normaliser(batch.targets, batch.size)) for batch in batches)
        if normaliser:
            self._batches, self.kept = self._fit(batches)
        by_jacobian = samples if self._keeps_jacobian else 0
        return torch.tensor([samples, normaliser, by_jacobian], dtype=torch.float64)

    def _sum(self, vector: Tensor) -> Tensor:
        objective, batch = self.objective, self.single_batch
        if batch is not None:
            if self._of_single_batch is None:
                work = Linearization(self._curvature, objective, batch, self._room())
                self._of_single_batch = objective.engine.launch(work).result()
            return self._of_single_batch(vector)
        parameters = self.objective.parameters
        pieces = parameters.pieces(vector)
        total: Tensor | None = None
        for index, batch in enumerate(self._batches):
            total = parameters.add(total, self._product_of(index, batch)(pieces))
        return torch.zeros_like(vector) if total is None else total

    def _product_of(self, index: int, batch: Batch) -> BatchProduct:
        curvature, network = self._curvature, self.objective.network
        if not self.kept:
            return curvature.linearize(network, batch)
        if index == len(self._kept_products):
            self._kept_products.append(curvature.linearize(network, batch, self._room()))
        return self._kept_products[index]

    def room(self) -> MakeRoom:
        """Makes memory for J, and is not kept, as it refers to `self`."""
        return self._curvature.room(self)

    def _room(self) -> MakeRoom | None:
        """See `room`; None without J."""
        return self.room() if self._keeps_jacobian else None

    def _fit(self, batches: list[Batch]) -> tuple[list[Batch], bool]:
        """Micro-batches whose graphs fit into memory, and whether all of the graphs fit at once.

        If J fits, it is to be kept in place of graphs.
        """
        objective, curvature = self.objective, self._curvature
        samples, self._keeps_jacobian = sum(batch.size for batch in batches), False
        try:
            curvature.check(objective, batches[0])
        except CurvatureError:
            raise
        except RuntimeError as problem:
            if is_out_of_memory(problem):
                raise
            self._fall_back(problem, batches[0])
        if not curvature.keeps_graphs:
            return batches, False
        parameters, largest = objective.parameters, objective.activation_memory
        if parameters.device.type == "cuda":
            largest = min(largest, kept_jacobian.LARGEST_ON_GPU)
        if samples * curvature.jacobian_bytes <= largest:
            self._keeps_jacobian = True
            return batches, True
        per_sample = curvature.bytes_per_sample
        if samples * per_sample <= objective.activation_memory:
            return batches, True
        size = max(1, int(objective.activation_memory / per_sample))
        return [piece for batch in batches for piece in batch.split(size)], False


@dataclass(frozen=True, slots=True)
class Linearization:
    """The work of linearising over one batch, whose graph or J is kept for all products.

    Attributes:
        curvature: H.
        objective: f.
        batch: the samples.
        room: makes memory for J; None for products without it.
    """

    curvature: Curvature
    objective: Objective
    batch: Batch
    room: MakeRoom | None

    def run(self) -> Product:
        """Return v → Hv for vectors [n], summed over the batch."""
        return self.curvature.flat_product(self.objective.network, self.batch, self.room)
