"""One term of an objective that is a weighted sum of several.

A term is the mean over its own samples of a squared residual, or of a loss of the model's outputs.
A residual belongs to points: it may differentiate the model there, as the equation of a
physics-informed net does.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, overload

from torch import Tensor

from krylov_descent.objective.batches import Batch, Tree, map_tensors
from krylov_descent.objective.losses import Loss, LossContractError, SampleLoss
from krylov_descent.runtime.validation import check_counts, check_counts_or_auto, check_not_negative

# A tensor [m, …], or a tuple of them, which the residual gets as several arguments.
Points = Tensor | tuple[Tensor, ...]
Sampler = Callable[[], Points]
Residual = Callable[..., Tensor]
Resampling = int | Literal["auto"]


class Term:
    """A term: `Term(residual, points)` or `Term((inputs, targets), loss)`.

    Args:
        residual: `residual(model, points) -> [m, …]`; its mean square is the term. It may use
            `torch.autograd.grad` or `torch.func` to differentiate by the points, which require a
            gradient. With a tuple of points it is called as `residual(model, *points)`. Or the data
            `(inputs, targets)`; the model is called with the inputs.
        points: a tensor [m, …], a tuple of tensors with the same m, or a function without arguments
            that draws them anew. Its random numbers must be torch's, which are seeded for each
            draw, so that a resumed run has the same points. Or, after data, the loss of the model's
            outputs; see `krylov_descent.objective.losses`.
        weight: the factor of the term in the sum. It may be changed between steps.
        resample: for points that are drawn: after how many steps they are drawn anew. "auto" does
            so when the term is more than twice as large on fresh points as on the old ones.
        held_out: other points or data of the same kind, on which steps report the term. Points that
            are drawn have fresh ones for it.
        subset_size: the number of samples of this term in B and in C; by default its share, and at
            least that of a term of average size.

    Attributes:
        weight: see above.
        points: the current points or data. New ones may be assigned between steps.

    Raises:
        TypeError: the arguments are of neither form.
        ValueError: a number is out of range, or points disagree on the number of samples.
    """

    @overload
    def __init__(
        self,
        residual: Residual,
        points: Points | Sampler,
        *,
        weight: float = 1.0,
        resample: Resampling = "auto",
        held_out: Points | None = None,
        subset_size: int | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        data: tuple[Tree, Tree],
        loss: Loss,
        /,
        *,
        weight: float = 1.0,
        held_out: tuple[Tree, Tree] | None = None,
        subset_size: int | None = None,
    ) -> None: ...

    def __init__(
        self,
        residual: Any,
        points: Any,
        *,
        weight: float = 1.0,
        resample: Resampling = "auto",
        held_out: Any = None,
        subset_size: int | None = None,
    ) -> None:
        self._residual: Residual | None = residual if callable(residual) else None
        if self._residual is None and not isinstance(residual, tuple):
            raise TypeError(
                "a term is Term(residual, points) with a function, or Term((inputs, targets), "
                f"loss) with a tuple, found {type(residual).__name__} first"
            )
        self._loss = None if self._residual else SampleLoss(points)
        self.sampler: Sampler | None = None
        self._points: Any = None
        if self._residual is None:
            self.points = residual
        elif callable(points) and not isinstance(points, Tensor):
            self.sampler = points
        else:
            self.points = points
        self.weight = weight
        check_counts_or_auto(resample=resample)
        self.resample = resample
        if subset_size is not None:
            check_counts(subset_size=subset_size)
        self.subset_size = subset_size
        self.held_out = None if held_out is None else self.batch_of(held_out)

    @property
    def weight(self) -> float:
        """The factor of the term in the sum."""
        return self._weight

    @weight.setter
    def weight(self, weight: float) -> None:
        check_not_negative(weight=weight)
        self._weight = float(weight)

    @property
    def rule(self) -> Any:
        """The residual, or the loss of the model's outputs."""
        return self._residual if self._loss is None else self._loss.module

    @property
    def is_residual(self) -> bool:
        """Whether the term is the mean square of a residual; else it is a loss of data."""
        return self._loss is None

    @property
    def points(self) -> Any:
        """The current points, or the data."""
        return self._points

    @points.setter
    def points(self, points: Any) -> None:
        self.batch = self.batch_of(points)
        self._points = points

    def batch_of(self, points: Any) -> Batch:
        """Points or data as a batch.

        Raises:
            TypeError: these are no tensors.
            ValueError: there are none, or the tensors disagree on the number of samples.
        """
        batch = Batch.of((points, None) if self._residual else points)
        if batch.size == 0:
            raise ValueError("a term needs at least one sample, found none")
        if self._loss is not None and float(
            self._loss.normaliser(batch.targets, batch.size)
        ) != float(batch.size):
            raise LossContractError(
                "the loss of a term must be a plain mean over samples: class weights, "
                "ignored targets and several targets per sample are not supported there"
            )
        return batch

    def outputs(self, model: Any, inputs: Tree) -> Tree:
        """The residuals [m, …] at the points, or the model's outputs for the inputs."""
        if self._residual is None:
            if isinstance(inputs, dict):
                return model(**inputs)
            return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)
        own = map_tensors(_differentiable, inputs)
        return self._residual(model, *own) if isinstance(own, tuple) else self._residual(model, own)

    def losses(self, outputs: Tree, targets: Tree, size: int) -> Tensor:
        """The loss of each sample [size], in the autograd graph of the outputs.

        Raises:
            LossContractError: the outputs have a wrong shape.
        """
        if self._loss is not None:
            return self._loss.per_sample(outputs, targets, size)
        if not isinstance(outputs, Tensor):
            raise LossContractError(
                f"the residual must be a tensor, found {type(outputs).__name__}: stack several "
                "residuals, or make them terms of their own"
            )
        if outputs.dim() == 0 or outputs.shape[0] != size:
            raise LossContractError(
                f"the residual has shape {tuple(outputs.shape)} for {size} points: its dimension 0 "
                "must count the points, without a mean or a sum over them"
            )
        return outputs.reshape(size, -1).square().mean(1)


def _differentiable(points: Tensor) -> Tensor:
    """The points as a leaf of its own, by which a residual can differentiate."""
    return points.detach().requires_grad_() if points.is_floating_point() else points


LossOrTerms = Loss | Mapping[str, Term]
