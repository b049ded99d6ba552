"""The loss contract: how outputs and targets become one number per sample.

The objective is a ratio of two sums over samples, Σ nᵢ / Σ wᵢ. For nearly every loss wᵢ = 1, so
the objective is the mean of the nᵢ. A cross-entropy with class weights or ignored targets divides
by another normaliser Σ wᵢ, and torch calls the result a mean, too.

A loss may be one of torch's two-argument losses (module or function), a callable that returns
one number per sample, or a callable that returns the mean of these numbers. A loss is always
called as loss(outputs, targets). Dimension 0 is the batch. Outputs may be nested.
"""

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from krylov_descent.objective.batches import Tree, map_tensors, replace_tensors, tensors_in
from krylov_descent.runtime.messages import first_line, is_out_of_memory
from krylov_descent.runtime.ops import operations

Loss = Callable[[Tree, Tree], Tensor]
# v → (∂² Σ nᵢ / ∂z²) v, over the list of output tensors z.
OutputHessian = Callable[[list[Tensor]], list[Tensor]]

# Losses whose targets must have the shape of the outputs.
PAIRWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
    nn.PoissonNLLLoss,
    nn.SoftMarginLoss,
)
ELEMENTWISE = (
    *PAIRWISE,
    nn.HingeEmbeddingLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.MultiMarginLoss,
    nn.MultiLabelMarginLoss,
)
CLASSWISE = (nn.CrossEntropyLoss, nn.NLLLoss)
MODULE_OF_FUNCTION: dict[Any, type[nn.Module]] = {
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
}


class LossContractError(ValueError):
    """The loss, or the model with it, is not a mean over independent samples."""


class SampleLoss:
    """A loss as nᵢ (`per_sample`) and Σ wᵢ (`normaliser`).

    With `reduction="sum"` the elements of a sample are summed, but samples are averaged, because
    the paper normalises every quantity by the number of samples.

    Args:
        loss: one of torch's losses, or a callable `(outputs, targets) -> Tensor` that returns
            one number per sample or their mean.

    Attributes:
        module: the loss; for a function of `torch.nn.functional` the equivalent module.
        known: whether it is one of torch's supported losses with reduction "mean" or "sum".

    Raises:
        TypeError: `loss` is not callable, or is a class.
        LossContractError: `loss` is one of torch's losses that is not supported.
    """

    def __init__(self, loss: Loss) -> None:
        if not callable(loss):
            raise TypeError(f"`loss` must be callable as loss(outputs, targets), found {loss!r}")
        if isinstance(loss, type) and issubclass(loss, nn.Module):
            raise TypeError(f"`loss` is a class: give an instance of it, {loss.__name__}()")
        function: Any = loss
        # Compared by identity, because a callable object may not be hashable.
        modules = [module() for known, module in MODULE_OF_FUNCTION.items() if known is function]
        self.module: Any = modules[0] if modules else function
        named = type(self.module) in (*ELEMENTWISE, *CLASSWISE)
        # A loss with reduction "none" is treated like any callable that returns one number each.
        self.known = named and self.module.reduction != "none"
        if self.known:
            self._elements: Any = copy.copy(self.module)
            self._elements.reduction = "none"
        elif not named and type(loss).__module__ == "torch.nn.modules.loss":
            raise LossContractError(
                f"`loss`: {type(loss).__name__} is not supported by name, because it is not "
                "called as loss(outputs, targets) or its dimension 0 is not the batch: wrap it "
                "in a function that returns one number per sample"
            )
        self._returns_mean = False
        self._vmap_works = True

    def per_sample(self, outputs: Tree, targets: Tree, size: int) -> Tensor:
        """nᵢ [size], in the autograd graph of the outputs.

        Raises:
            LossContractError: the loss is not a mean over samples, or shapes do not fit.
        """
        if not self.known:
            return self._per_sample_of_callable(outputs, targets, size)
        self._check_shapes(outputs, targets)
        plain = self.is_plain_cross_entropy and isinstance(outputs, Tensor)
        if plain and outputs.shape[:1] == (size,):
            averaged = self._averages_elements
            return operations().cross_entropy(outputs, targets, averaged=averaged)
        self._check_weight(outputs)
        elements: Tensor = self._elements(outputs, targets)
        if elements.dim() == 0 or elements.shape[0] != size:
            raise LossContractError(
                f"`loss`: {type(self.module).__name__} gave shape {tuple(elements.shape)} for "
                f"{size} samples: dimension 0 of the outputs must be the batch"
            )
        elements = elements.reshape(size, -1)
        if self._averages_elements:
            return elements.mean(1)
        return elements.sum(1)

    def normaliser(self, targets: Tree, size: int) -> float | Tensor:
        """Σ wᵢ of a batch: the number of samples, or the number by which torch divides instead."""
        if not self._divides_by_weights(targets):
            return float(size) * self._elements_counted(targets, size)
        return self._class_weights(targets).sum(dtype=torch.float64)

    def output_hessian(self, outputs: Tree, targets: Tree, size: int) -> OutputHessian:
        """v → (∂² Σ nᵢ / ∂z²) v at outputs z, in closed form if known, else by autograd."""
        closed = self._closed_output_hessian(outputs, targets)
        if closed is not None:
            return closed
        detached = map_tensors(
            lambda z: z.detach().requires_grad_() if z.is_floating_point() else z, outputs
        )
        leaves = [z for z in tensors_in(detached) if z.requires_grad]
        with torch.enable_grad():
            total = self.per_sample(detached, targets, size).sum()
            first = torch.autograd.grad(
                total, leaves, create_graph=True, allow_unused=True, materialize_grads=True
            )
        curved = [i for i, gradient in enumerate(first) if gradient.requires_grad]

        def product(vectors: list[Tensor]) -> list[Tensor]:
            if not curved:  # the loss is linear in the outputs
                return [torch.zeros_like(v) for v in vectors]
            return list(
                torch.autograd.grad(
                    [first[i] for i in curved],
                    leaves,
                    [vectors[i] for i in curved],
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )

        return product

    # Torch's own losses ---------------------------------------------------------------------

    @property
    def _averages_elements(self) -> bool:
        return type(self.module) in ELEMENTWISE and bool(self.module.reduction == "mean")

    @property
    def is_plain_cross_entropy(self) -> bool:
        """Whether the loss is a BCEWithLogitsLoss without weights."""
        loss = self.module
        plain = type(loss) is nn.BCEWithLogitsLoss and self.known
        return plain and loss.weight is None and loss.pos_weight is None

    @property
    def _averages_classes(self) -> bool:
        return self.known and type(self.module) in CLASSWISE and self.module.reduction == "mean"

    def _divides_by_weights(self, targets: Tree) -> bool:
        return self._averages_classes and not targets.is_floating_point()

    def _elements_counted(self, targets: Tree, size: int) -> float:
        # For class probabilities [m, C, …] as targets torch's mean divides by all positions [m, …].
        if self._averages_classes:
            return float(targets[:, 0].numel()) / size
        return 1.0

    def _class_weights(self, targets: Tensor) -> Tensor:
        """The weight of every target: its class weight, or zero if the target is ignored."""
        counted: Tensor = targets != self.module.ignore_index
        if self.module.weight is None:
            return counted
        weight: Tensor = self.module.weight
        return weight[torch.where(counted, targets, 0)] * counted

    def _check_shapes(self, outputs: Tree, targets: Tree) -> None:
        """Refuse unequal shapes: torch would broadcast outputs [m, 1] and targets [m] to [m, m]."""
        if type(self.module) not in PAIRWISE or not isinstance(outputs, Tensor):
            return
        if isinstance(targets, Tensor) and outputs.shape != targets.shape:
            raise LossContractError(
                f"`loss`: {type(self.module).__name__} compares element by element, but the "
                f"outputs have shape {tuple(outputs.shape)} and the targets "
                f"{tuple(targets.shape)}: give both the same shape"
            )

    def _check_weight(self, outputs: Tree) -> None:
        """Refuse weights per sample, before torch raises a shape error on a part of the data."""
        if type(self.module) not in (nn.BCELoss, nn.BCEWithLogitsLoss):
            return
        for name in ("weight", "pos_weight"):
            weight: Tensor | None = getattr(self.module, name, None)
            if weight is not None and weight.dim() == outputs.dim() and weight.shape[0] != 1:
                raise LossContractError(
                    f"`loss`: {type(self.module).__name__} has a `{name}` per sample, which has "
                    "no meaning for subsets of the data: put the weights into the targets and use "
                    "a function that returns one number per sample"
                )

    def _closed_output_hessian(self, outputs: Tree, targets: Tree) -> OutputHessian | None:
        loss = self.module
        if not self.known or not isinstance(outputs, Tensor):
            return None
        scale = float(outputs.shape[0]) / outputs.numel() if self._averages_elements else 1.0
        if type(loss) is nn.MSELoss:
            return lambda v: [2.0 * scale * v[0]]
        if self.is_plain_cross_entropy:
            p = outputs.detach().sigmoid()
            variance = scale * p * (1 - p)
            return lambda v: [variance * v[0]]
        if (
            type(loss) is nn.CrossEntropyLoss
            and not targets.is_floating_point()
            and (loss.weight is None or loss.label_smoothing == 0)
        ):
            # diag(p) - ppᵀ (paper, Section 2.2), times the weight of each target.
            p = outputs.detach().softmax(1)
            weighted = p * self._class_weights(targets).unsqueeze(1)
            return lambda v: [weighted * (v[0] - (p * v[0]).sum(1, keepdim=True))]
        return None

    # Callables ------------------------------------------------------------------------------

    def _per_sample_of_callable(self, outputs: Tree, targets: Tree, size: int) -> Tensor:
        if self._returns_mean and size > 1:
            return self._one_by_one(outputs, targets)
        result = self.module(outputs, targets)
        if not isinstance(result, Tensor):
            raise LossContractError(
                f"`loss` must return a tensor, found {type(result).__name__}: return one number "
                "per sample, or their mean"
            )
        if result.numel() == size and result.dim() > 0 and result.shape[0] == size:
            return result.reshape(size)
        if result.dim() > 0:
            raise LossContractError(
                f"`loss` returned shape {tuple(result.shape)} for {size} samples: return one "
                "number per sample, or their mean"
            )
        if size == 1:
            return result.reshape(1)
        self._returns_mean = True
        per_sample = self._one_by_one(outputs, targets)
        _check_mean(float(result.detach()), per_sample.detach())
        return per_sample

    def _one_by_one(self, outputs: Tree, targets: Tree) -> Tensor:
        """Losses [size] of a callable that returns a mean, called with batches of one sample."""
        nest = (outputs, targets)
        columns = tensors_in(nest)

        def single(*row: Tensor) -> Tensor:
            output, target = replace_tensors(nest, [t.unsqueeze(0) for t in row])
            loss: Tensor = self.module(output, target)
            return loss

        if self._vmap_works:
            try:
                per_sample: Tensor = torch.vmap(single)(*columns)
                return per_sample
            except RuntimeError as problem:
                if is_out_of_memory(problem):
                    raise
                self._vmap_works = False
                warnings.warn(
                    "the loss returns a mean and cannot be vectorised over samples "
                    f"({first_line(problem)}); it is called once per sample, which is slow: "
                    "return one number per sample instead",
                    stacklevel=2,
                )
        return torch.stack([single(*row) for row in zip(*columns, strict=True)])


def _check_mean(whole: float, per_sample: Tensor) -> None:
    mean = float(per_sample.double().mean())
    scale = float(per_sample.double().abs().mean())
    tolerance = 1e-3 if per_sample.dtype in (torch.float32, torch.float64) else 3e-2
    # If `whole` is not finite, the step reports it. NaN in `per_sample` alone is an error here.
    if math.isfinite(whole) and not abs(whole - mean) <= tolerance * scale:
        raise LossContractError(
            f"`loss` returned {whole:.6g} for {len(per_sample)} samples, but the mean over the "
            f"samples one by one is {mean:.6g}: it is not a mean over samples. Return one number "
            "per sample, or their plain mean"
        )
