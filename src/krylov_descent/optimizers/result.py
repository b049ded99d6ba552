"""The result of a step: what the step did and what it cost."""

from dataclasses import dataclass, field, fields
from enum import Enum

# The reason for `Status.NO_DECREASE` when the search found a step that `lr` then spoilt.
SCALED_AWAY = "the step scaled by `lr` is no decrease; the parameters are unchanged"


class Status(Enum):
    """How a step ended; the value is a sentence for people."""

    MOVED = "the step was taken"
    STATIONARY = "the gradient is zero, so there is nowhere to go; the parameters are unchanged"
    NO_DECREASE = (
        "the search found no decrease beyond the objective's rounding noise; "
        "the parameters are unchanged"
    )
    NOT_FINITE = "a number was NaN or infinite; the parameters are unchanged"

    @property
    def moved(self) -> bool:
        """Whether the parameters changed."""
        return self is Status.MOVED


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did and what it cost. `print(result)` gives one line.

    Attributes:
        loss: the objective on A before the step, L2 included.
        loss_before: the objective on C before the step.
        loss_after: the objective on C after the step; equal to `loss_before` if no step was taken.
        status: how the step ended.
        reason: one sentence on the status: which number was not finite, or why the search ended.
        noise: standard deviation of the rounding error of the objective on C.
        gradient_norm: ‖g‖ on A.
        gradient_noise: how far the gradient on C moves when each parameter moves by its rounding
            error. It is measured only if no decrease was found, else None.
        step_norm: ‖d‖ of the step taken; 0 if none was taken.
        rank: dimension of the subspace that was searched.
        dimension_reason: how many directions the next step of KSD has, and why; empty if the number
            was given or no step was taken.
        ritz_values: eigenvalues of the projected curvature H̄, ascending, before flooring.
        samples: |A|.
        curvature_samples: |B|.
        objective_samples: |C|.
        iterations: of the search.
        evaluations: of the objective on C; with its gradient, except in Hessian-Free.
        products: curvature products on B. For KSD the products that became a direction of the
            basis, so `products == rank`, but 0 in a damped step; for Hessian-Free those of CG.
        passes: work in passes over A: the samples processed for gradient, products and evaluations,
            divided by |A|.
        graphs_kept: whether the autograd graphs of B were kept for all products. False means that
            they exceed the memory for activations and were rebuilt for each product.
        damping: λ of Hessian-Free after the step. For a damped step of KSD that of the direction
            which the step is most along, in units of ‖JJᵀ‖₁. None for other steps and methods.
        reduction_ratio: ρ of Hessian-Free, the change of the objective divided by the change of the
            quadratic model; minus infinity if the objective rose. None for other methods.
        chosen_iteration: the iteration of CG whose iterate became the direction in Hessian-Free;
            None for other methods.
        rate: the factor by which the line search of Hessian-Free shortened the direction; None for
            other methods.
        terms: for an objective of terms, each of them on all its samples before the step, without
            its weight.
        held_out: the same on samples that no step is made with, of the terms that have them.
        seconds: wall-clock time by phase ("gradient"; "basis" or "cg"; "search").
    """

    loss: float
    loss_before: float
    loss_after: float
    status: Status
    reason: str
    noise: float = 0.0
    gradient_norm: float = 0.0
    gradient_noise: float | None = None
    step_norm: float = 0.0
    rank: int = 0
    dimension_reason: str = ""
    ritz_values: tuple[float, ...] = ()
    samples: int = 0
    curvature_samples: int = 0
    objective_samples: int = 0
    iterations: int = 0
    evaluations: int = 0
    products: int = 0
    passes: float = 0.0
    graphs_kept: bool = True
    damping: float | None = None
    reduction_ratio: float | None = None
    chosen_iteration: int | None = None
    rate: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """Wall-clock time of the whole step."""
        return sum(self.seconds.values())

    def numbers(self) -> dict[str, float]:
        """All single numbers by name, for loggers; those of a term or a phase as "terms/wall"."""
        found: dict[str, float] = {"moved": float(self.status.moved)}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, int | float):
                found[entry.name] = float(value)
            elif isinstance(value, dict):
                found |= {f"{entry.name}/{key}": number for key, number in value.items()}
        return found

    def __str__(self) -> str:
        change = f"{self.loss_before:.6g} -> {self.loss_after:.6g}"
        same = self.objective_samples == self.samples
        parts = [f"loss {change}" if same else f"loss {self.loss:.6g} | subset {change}"]
        if not self.status.moved:
            parts = [f"loss {self.loss:.6g} | no step: {self.reason}"]
        if self.rank:
            parts.append(f"rank {self.rank}")
        if self.evaluations:
            parts.append(f"{self.evaluations} evals")
        if self.products:
            parts.append(f"{self.products} products")
        if self.damping is not None:
            parts.append(f"damping {self.damping:.3g}")
        parts.append(f"{self.total_seconds:.2f} s")
        for name, value in self.terms.items():
            other = f" ({self.held_out[name]:.3g} held out)" if name in self.held_out else ""
            parts.append(f"{name} {value:.3g}{other}")
        return " | ".join(parts)
