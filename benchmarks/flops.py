"""Floating-point operations of the matrix products that a step cannot do without.

For a stack of Linear layers with elementwise functions between them, per sample and with p_l the
inputs times the outputs of layer l, Σ their sum and p_1 that of the first layer, in
multiplications (two operations each):

| what | forward | backward to inputs | to weights | together |
| --- | --- | --- | --- | --- |
| gradient | Σ | Σ − p_1 | Σ | 3Σ − p_1 |
| Fisher diagonal beside it: (δ²)ᵀ(x²) | | | Σ | Σ |
| Gauss-Newton product: Jv, then Jᵀ | 2Σ − p_1 | Σ − p_1 | Σ | 4Σ − 2p_1 |

The first layer needs no gradient of its inputs, and its inputs do not move with the weights.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LinearStack:
    """Operations per sample; `weights` are the p_l from the input on."""

    weights: tuple[int, ...]

    @staticmethod
    def of(model: nn.Module) -> "LinearStack":
        """Of a sequence of Linear layers and functions without weights.

        Raises:
            ValueError: other layers have weights, too.
        """
        layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
        known = {id(p) for layer in layers for p in layer.parameters()}
        if not layers or any(id(p) not in known for p in model.parameters()):
            raise ValueError("`model` must be a stack of Linear layers: count others by hand")
        return LinearStack(tuple(layer.in_features * layer.out_features for layer in layers))

    @property
    def value(self) -> int:
        """The forward pass."""
        return 2 * sum(self.weights)

    @property
    def gradient(self) -> int:
        """Value and gradient."""
        return 2 * (3 * sum(self.weights) - self.weights[0])

    @property
    def gradient_with_squares(self) -> int:
        """Value, gradient and Fisher diagonal."""
        return self.gradient + 2 * sum(self.weights)

    @property
    def product(self) -> int:
        """One Gauss-Newton product, the linearisation being there."""
        return 2 * (4 * sum(self.weights) - 2 * self.weights[0])


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Operations of a KSD step by phase, and those among them that are forward passes."""

    gradient: int
    basis: int
    search: int
    gradient_forward: int
    search_forward: int

    @staticmethod
    def of(
        stack: LinearStack,
        *,
        samples: int,
        curvature_samples: int,
        objective_samples: int,
        products: int,
        evaluations: int,
    ) -> "StepFlops":
        """Gradient and Fisher diagonal on A, products on B, evaluations on C."""
        return StepFlops(
            gradient=samples * stack.gradient_with_squares,
            basis=products * curvature_samples * stack.product,
            search=evaluations * objective_samples * stack.gradient,
            gradient_forward=samples * stack.value,
            search_forward=evaluations * objective_samples * stack.value,
        )

    def by_phase(self) -> dict[str, int]:
        """Under the names that `StepResult.seconds` has."""
        return {"gradient": self.gradient, "basis": self.basis, "search": self.search}

    def forward_by_phase(self) -> dict[str, int]:
        """The forward passes; the one before the products is not counted."""
        return {"gradient": self.gradient_forward, "basis": 0, "search": self.search_forward}
