"""Curvature as a product v → Hv, linearised once at a fixed point (paper, Section 2).

Three matrices, each a mean over the samples of set B, plus λ for the L2 term:

    gauss-newton   JᵀH_E J, with J = ∂outputs/∂θ and H_E the loss's Hessian in the outputs
    hessian        ∂²f/∂θ²
    fisher         Σ gᵢgᵢᵀ, which is JᵀJ with J = ∂(per-sample losses)/∂θ

J is applied without ever being formed. Jᵀu is a backward pass, linear in u; its own
backward pass, towards u, is Jv. The graph of Jᵀu is built once per step, so a product costs
two backward passes and no forward pass: about 4/3 of a gradient, less where the first layer
needs no input gradient. Where an operation has no second derivative the products go through
forward-mode differentiation instead, a fresh forward pass each.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from krylov_descent import double_backward, forward_mode
from krylov_descent.aliased import Aliased
from krylov_descent.batches import Batch, Stream, Tree, as_samples, map_tensors
from krylov_descent.cuda_graphs import RecordedProduct
from krylov_descent.derivative_checks import check_double_backward, check_symmetric
from krylov_descent.double_backward import floating, losses_of, outputs_of
from krylov_descent.forward_mode import BatchProduct
from krylov_descent.lean_functions import LeanFunctions
from krylov_descent.messages import first_line, is_out_of_memory
from krylov_descent.network import Network
from krylov_descent.objective import Objective
from krylov_descent.probes import PROBE_SAMPLES, Findings, kept_bytes

CurvatureKind = Literal["gauss-newton", "hessian", "fisher"]
Linearize = Callable[[Network, Batch], BatchProduct]
Product = Callable[[Tensor], Tensor]


class CurvatureError(RuntimeError):
    """No route of differentiation gives this curvature for this model."""


class Curvature:
    """One kind of curvature; remembers from step to step which route works for the model.

    Args:
        kind: "gauss-newton", "hessian" or "fisher".
    """

    def __init__(self, kind: CurvatureKind = "gauss-newton") -> None:
        if kind not in get_args(CurvatureKind):
            raise ValueError(
                f"`curvature` must be one of {', '.join(map(repr, get_args(CurvatureKind)))}, "
                f"found {kind!r}"
            )
        self.kind: CurvatureKind = kind
        self._by_graph, self._by_forward_mode = _ROUTES[kind]
        self._linearize: Linearize = self._by_graph
        self._measured: tuple[Findings, float] | None = None

    def at(self, objective: Objective, data: Any) -> "CurvatureProduct":
        """The product over the data at the parameters as they are now."""
        return CurvatureProduct(self, objective, data)

    @property
    def keeps_graphs(self) -> bool:
        """Whether a linearisation can be kept and used again for further products."""
        return self._linearize is self._by_graph

    def linearize(self, network: Network, batch: Batch) -> BatchProduct:
        """Prepare v → Hv, summed over one batch."""
        return self._linearize(network, batch)

    def fall_back(self, problem: RuntimeError) -> None:
        """Take the next route, and say so once."""
        if not self.keeps_graphs:
            raise CurvatureError(
                f"curvature {self.kind!r} is not available for this model, neither by double "
                f"backward nor by forward-mode differentiation: {first_line(problem)}"
            ) from problem
        self._linearize, self._measured = self._by_forward_mode, None
        warnings.warn(
            f"the model has no second derivative by double backward ({first_line(problem)}); "
            "curvature products use forward-mode differentiation, which costs about twice as much",
            stacklevel=2,
        )

    def bytes_per_sample(self, objective: Objective, batch: Batch) -> float:
        """What a kept linearisation takes per sample; checked and measured on a few of them."""
        if self._measured is None or self._measured[0] is not objective.findings:
            few = batch.spread(PROBE_SAMPLES)
            self._check(objective.network, few, objective.findings.derivative_epsilon)
            half = few.rows(0, max(1, few.size // 2))
            sizes = [
                kept_bytes(
                    partial(self.linearize, objective.network, piece), objective.parameters.tensors
                )
                for piece in (few, half)
            ]
            growth = (sizes[0] - sizes[1]) / max(1, few.size - half.size)
            per_sample = growth if few.size > half.size else float(sizes[0])
            self._measured = (objective.findings, max(1.0, per_sample))
        return self._measured[1]

    def _check(self, network: Network, few: Batch, epsilon: float) -> None:
        """Raise where the route leaves out a part of the curvature without an error."""
        parameters = network.parameters.tensors
        if self.kind == "hessian":
            # Also by double backward: that of torch's weight_norm of a convolution is wrong.
            check_symmetric(self.linearize(network, few), parameters, epsilon)
        if not self.keeps_graphs:
            # Forward mode swaps parameters, as aliases do.
            aliased = Aliased(network)
            by_outputs = self.kind == "gauss-newton"
            found = outputs_of(aliased, few) if by_outputs else losses_of(aliased, few)
            aliased.check_leaves(floating(found))
            return
        if self.kind == "gauss-newton":
            with LeanFunctions():
                outputs = outputs_of(network, few)
            _check_loss(network, outputs, few, epsilon)
            _warn_of_linear_loss(network, outputs, few)
            check_double_backward(floating(outputs), parameters, epsilon)
        else:
            with LeanFunctions():
                losses = losses_of(network, few)
            check_double_backward([losses], parameters, epsilon)


def _held(objective: Objective, data: Any) -> list[Batch]:
    """The data in micro-batches that stay as they are; a stream may fill the same tensors again."""
    samples = as_samples(data, may_be_empty=objective.ranks.together)
    batches = objective.micro_batches(samples)
    return [b.map(torch.clone) if isinstance(samples, Stream) else b for b in batches]


class CurvatureProduct:
    """Products v → Hv over one set of samples at one point.

    Valid until the parameters change. Memory: the graphs of all samples while they fit the
    objective's `activation_memory`, else those of one micro-batch, built anew for each product
    (about 2.3 gradients instead of 4/3).

    Attributes:
        objective: f.
        samples: |B|, on all ranks together.
        products: how many were computed.
        kept: whether the graphs are kept (on this rank).
        scale: what the sum over the samples is multiplied by.
    """

    def __init__(self, curvature: Curvature, objective: Objective, data: Any) -> None:
        self._curvature, self.objective = curvature, objective
        self._batches: list[Batch] = []
        self._kept_products: list[BatchProduct] = []
        self._recorded: RecordedProduct | None = None
        self.kept, self.products = True, 0
        own = torch.zeros(2, dtype=torch.float64)
        with objective.ranks.own_work():
            own = self._prepare(_held(objective, data))
        samples, normaliser = objective.ranks.sum_numbers(own).tolist()
        if normaliser == 0:
            raise ValueError(
                "the set for the curvature has no sample that counts: it is empty, or every "
                "target is ignored or has weight zero"
            )
        self.samples = int(samples)
        # The sample's part of the mean is nᵢN/W; Fisher has it squared, over N.
        self.scale = self.samples / normaliser**2 if curvature.kind == "fisher" else 1 / normaliser

    @property
    def kind(self) -> CurvatureKind:
        """Which curvature it is."""
        return self._curvature.kind

    @property
    def batches(self) -> Sequence[Batch]:
        """This rank's samples."""
        return self._batches

    @property
    def single_batch(self) -> Batch | None:
        """All samples, where they fit one batch whose graph is kept; else None."""
        return self._batches[0] if self.kept and len(self._batches) == 1 else None

    def over(self, network: Network, batch: Batch, scale: Tensor) -> Product:
        """v → Hv over another batch, as kernels alone: linearised now, for a recording."""
        product = self._curvature.linearize(network, batch)
        parameters = network.parameters

        def apply(vector: Tensor) -> Tensor:
            result = parameters.flatten(product(parameters.pieces(vector)))
            return parameters.scale_and_add_decay(result, scale, vector)

        return apply

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv as a new vector [n], summed over ranks."""
        return self.objective.ranks.sum_vector(self.part(vector))

    def part(self, vector: Tensor) -> Tensor:
        """What this rank adds to Hv, as a new vector [n]; the L2 term is rank 0's."""
        ranks = self.objective.ranks
        result: Tensor | None = None
        with ranks.own_work():
            if not self.products:
                self._recorded = self._record()
            result = self._own_product(vector).mul_(self.scale)
        self.products += 1
        if result is None:
            return torch.zeros_like(vector)
        if ranks.leads:
            self.objective.parameters.add_decay(result, vector)
        return result

    def _fall_back(self, problem: RuntimeError, batch: Batch) -> None:
        with self.objective.value_mode():  # what fails here, too, is no matter of derivatives
            self.objective.network.sample_losses(batch.rows(0, 1))
        self._curvature.fall_back(problem)

    def _own_product(self, vector: Tensor) -> Tensor:
        try:
            return self._sum(vector)
        except (RuntimeError, NotImplementedError) as problem:
            if is_out_of_memory(problem):
                raise
            self._fall_back(problem, self._batches[0])
            self._kept_products, self.kept, self._recorded = [], False, None
            return self._own_product(vector)

    def _prepare(self, batches: list[Batch]) -> Tensor:
        """Take up this rank's samples; returns their number and normaliser."""
        samples = sum(batch.size for batch in batches)
        loss = self.objective.network.loss
        normaliser = sum(float(loss.normaliser(batch.targets, batch.size)) for batch in batches)
        if normaliser:
            self._batches, self.kept = self._fit(batches, samples)
        return torch.tensor([samples, normaliser], dtype=torch.float64)

    def _record(self) -> RecordedProduct | None:
        """On a GPU: the products as one launch each."""
        recordings, batch = self.objective.recordings, self.single_batch
        if batch is None or not recordings.possible:
            return None
        recordings.hold(batch)
        recorded = recordings.product(batch, self._curvature.linearize, self._curvature.kind)
        if recorded is not None:
            recorded.load(batch)
        return recorded

    def _sum(self, vector: Tensor) -> Tensor:
        if self._recorded is not None:
            return self._recorded(vector)
        parameters = self.objective.parameters
        pieces = parameters.pieces(vector)
        total: Tensor | None = None
        for index, batch in enumerate(self._batches):
            total = parameters.add(total, self._product_of(index, batch)(pieces))
        return torch.zeros_like(vector) if total is None else total

    def _product_of(self, index: int, batch: Batch) -> BatchProduct:
        if not self.kept:
            return self._curvature.linearize(self.objective.network, batch)
        if index == len(self._kept_products):
            self._kept_products.append(self._curvature.linearize(self.objective.network, batch))
        return self._kept_products[index]

    def _fit(self, batches: list[Batch], samples: int) -> tuple[list[Batch], bool]:
        """Micro-batches whose graphs fit the memory, and whether all of them fit at once."""
        objective, curvature = self.objective, self._curvature
        try:
            per_sample = curvature.bytes_per_sample(objective, batches[0])
        except CurvatureError:
            raise
        except (RuntimeError, NotImplementedError) as problem:
            if is_out_of_memory(problem):
                raise
            self._fall_back(problem, batches[0])
            return self._fit(batches, samples)
        if not curvature.keeps_graphs:
            return batches, False
        if samples * per_sample <= objective.activation_memory:
            return batches, True
        size = max(1, int(objective.activation_memory / per_sample))
        return [piece for batch in batches for piece in batch.split(size)], False


def _check_loss(network: Network, outputs: Tree, few: Batch, epsilon: float) -> None:
    """H_E is taken by double backward on both routes, where it has no closed form."""
    apart = map_tensors(lambda z: z.detach().requires_grad_(z.is_floating_point()), outputs)
    try:
        losses = network.losses_of(apart, few, eager=True)
        check_double_backward([losses], floating(apart), epsilon)
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            raise
        raise CurvatureError(
            f"the loss has no second derivative in the outputs ({first_line(problem)}): write it "
            "with operations that can be differentiated twice, or use curvature='fisher'"
        ) from problem


def _warn_of_linear_loss(network: Network, outputs: Tree, few: Batch) -> None:
    """JᵀH_E J of a loss that is linear in the outputs is zero, and so no help at all."""
    # Along no special direction: a softmax has no curvature along (1, …, 1).
    directions = [
        torch.arange(z.numel(), device=z.device).cos().to(z.dtype).reshape(z.shape)
        for z in floating(outputs)
    ]
    curved = network.output_hessian(outputs, few)(directions)
    if not any(bool(z.any()) for z in curved):
        warnings.warn(
            "the loss is linear in the model's outputs, as NLLLoss is in log-probabilities, so "
            "the Gauss-Newton matrix is zero and steps follow the gradient alone: use "
            "CrossEntropyLoss on the logits, or curvature='hessian' or 'fisher'",
            stacklevel=2,
        )


_ROUTES: dict[str, tuple[Linearize, Linearize]] = {
    "gauss-newton": (double_backward.gauss_newton, forward_mode.gauss_newton),
    "hessian": (double_backward.hessian, forward_mode.hessian),
    "fisher": (double_backward.fisher, forward_mode.fisher),
}
